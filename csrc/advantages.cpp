#include "advantages.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "advantages_rows.hpp"
#include "logprobs_elements.hpp"
#include "thread_pool.hpp"

namespace xrpo {
namespace {

// Fewer rows or tokens than this are done before another thread wakes up.
constexpr std::int64_t MIN_PARALLEL_ITEMS = 1 << 15;
constexpr std::int64_t TASK_ITEMS = 1 << 10;

const RowKernels& best_kernels() noexcept {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        return avx2_row_kernels();
    }
#endif
    return base_row_kernels();
}

double sum_of_tokens(const void* tokens, Dtype dtype, std::int64_t begin,
                     std::int64_t end) noexcept {
    double total = 0;
    for (std::int64_t t = begin; t < end; ++t) {
        total += load_element(dtype, tokens, t);
    }
    return total;
}

struct Score {
    double value;
    bool exists;
};

// Mean of the row's tokens; 0 without one.
Score token_score(const AdvantageInputs& in, std::int64_t row) noexcept {
    double total = 0;
    std::int64_t count = 0;
    if (in.token_mask == nullptr) {
        const std::int64_t begin = in.cu_seqlens[row], end = in.cu_seqlens[row + 1];
        total = sum_of_tokens(in.token_logprobs, in.token_dtype, begin, end);
        count = end - begin;
    } else {
        for (std::int64_t t = row * in.row_tokens; t < (row + 1) * in.row_tokens; ++t) {
            if (in.token_mask[t]) {
                total += load_element(in.token_dtype, in.token_logprobs, t);
                ++count;
            }
        }
    }
    const double mean = count > 0 ? total / static_cast<double>(count) : 0.0;
    return {mean, count > 0 && std::isfinite(mean)};
}

// Score of each row, and 1 in takes_part where it exists.
void load_scores(const AdvantageInputs& in, std::int64_t begin, std::int64_t end,
                 const RowTerms& terms) noexcept {
    for (std::int64_t i = begin, k = 0; i < end; ++i, ++k) {
        Score score{0.0, false};
        if (in.scores != nullptr) {
            score.value = load_element(in.scores_dtype, in.scores, i);
            score.exists = std::isfinite(score.value);
        } else if (in.token_logprobs != nullptr) {
            score = token_score(in, i);
        }
        terms.score[k] = score.value;
        terms.takes_part[k] = static_cast<double>(score.exists);
    }
}

RowTerms columns_of(double* storage, std::int64_t stride) noexcept {
    RowTerms terms;
    for (double** column : {&terms.reward, &terms.score, &terms.takes_part, &terms.can_gain,
                            &terms.first, &terms.mean_deviation, &terms.inverse_std, &terms.std,
                            &terms.mean_score}) {
        *column = storage;
        storage += stride;
    }
    return terms;
}

Statistics batch_statistics(const AdvantageInputs& in, const RowKernels& kernels) {
    std::vector<double> rewards(static_cast<std::size_t>(in.num_seqs + SHORT_GROUP));
    for (std::int64_t i = 0; i < in.num_seqs; ++i) {
        rewards[static_cast<std::size_t>(i)] =
            load_element(in.is_double ? Dtype::F64 : Dtype::F32, in.rewards, i);
    }
    return kernels.statistics(rewards.data(), in.num_seqs, in.ddof);
}

std::int64_t num_tasks(std::int64_t items) noexcept {
    return items < MIN_PARALLEL_ITEMS ? 1 : items / TASK_ITEMS;
}

}  // namespace

void xrpo_advantages_fwd(const AdvantageInputs& in, const AdvantageResults& out) {
    static const RowKernels& kernels = best_kernels();
    const bool by_batch = in.scale == Scale::BATCH;
    const Statistics batch = by_batch ? batch_statistics(in, kernels) : Statistics{};
    std::int64_t items = in.num_seqs;
    if (in.token_logprobs != nullptr) {
        items += in.token_mask != nullptr ? in.num_seqs * in.row_tokens : in.cu_seqlens[in.num_seqs];
    }
    const std::int64_t tasks = num_tasks(items);
    parallel_for(tasks, in.num_threads, [&](std::int64_t task) {
        const std::int64_t first_group = in.num_groups * task / tasks;
        const std::int64_t last_group = in.num_groups * (task + 1) / tasks;
        const std::int64_t begin = in.cu_groups[first_group], end = in.cu_groups[last_group];
        const std::int64_t stride = end - begin + SHORT_GROUP;
        const std::unique_ptr<double[]> storage(
            new double[static_cast<std::size_t>(RowTerms::NUM_COLUMNS * stride)]);
        const RowTerms terms = columns_of(storage.get(), stride);
        load_scores(in, begin, end, terms);
        kernels.load(in, begin, end, terms);
        for (std::int64_t g = first_group; g < last_group; ++g) {
            const std::int64_t row = in.cu_groups[g];
            kernels.reduce(in, by_batch ? &batch : nullptr, row - begin, in.cu_groups[g + 1] - row,
                           terms);
        }
        kernels.finish(in, out, begin, end, terms);
    });
}

void sequence_logprobs_fwd(const void* token_logprobs, Dtype dtype, Offsets cu_seqlens,
                           std::int64_t num_seqs, bool is_mean, void* scores,
                           std::int64_t* lengths, int num_threads) {
    const std::int64_t tasks = num_tasks(num_seqs + cu_seqlens[num_seqs]);
    parallel_for(tasks, num_threads, [&](std::int64_t task) {
        const std::int64_t last = num_seqs * (task + 1) / tasks;
        for (std::int64_t s = num_seqs * task / tasks; s < last; ++s) {
            const std::int64_t begin = cu_seqlens[s], end = cu_seqlens[s + 1];
            double total = sum_of_tokens(token_logprobs, dtype, begin, end);
            if (is_mean && end > begin) {
                total /= static_cast<double>(end - begin);
            }
            store_stat(dtype, scores, s, total);
            lengths[s] = end - begin;
        }
    });
}

}  // namespace xrpo

#include "advantages.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "logprobs_elements.hpp"
#include "thread_pool.hpp"

namespace xrpo {
namespace {

constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();
// Fewer rows or tokens than this are done before another thread wakes up.
constexpr std::int64_t MIN_PARALLEL_ITEMS = 1 << 15;
constexpr std::int64_t TASK_ITEMS = 1 << 12;

struct Score {
    double value;
    bool exists;  // of at least one token, and finite
};

Score mean_of_tokens(double total, std::int64_t count) noexcept {
    const double mean = count > 0 ? total / static_cast<double>(count) : 0;
    return {mean, count > 0 && std::isfinite(mean)};
}

double sum_of_tokens(const void* tokens, Dtype dtype, std::int64_t begin,
                     std::int64_t end) noexcept {
    double total = 0;
    for (std::int64_t t = begin; t < end; ++t) {
        total += load_element(dtype, tokens, t);
    }
    return total;
}

Score score_of_row(const AdvantageInputs& in, std::int64_t row) noexcept {
    if (in.scores != nullptr) {
        const double value = load_element(in.scores_dtype, in.scores, row);
        return {value, std::isfinite(value)};
    }
    if (in.token_logprobs == nullptr) {
        return {0, false};
    }
    if (in.token_mask == nullptr) {
        const std::int64_t begin = in.cu_seqlens[row], end = in.cu_seqlens[row + 1];
        return mean_of_tokens(sum_of_tokens(in.token_logprobs, in.token_dtype, begin, end),
                              end - begin);
    }
    double total = 0;
    std::int64_t count = 0;
    for (std::int64_t t = row * in.row_tokens; t < (row + 1) * in.row_tokens; ++t) {
        if (in.token_mask[t]) {
            total += load_element(in.token_dtype, in.token_logprobs, t);
            ++count;
        }
    }
    return mean_of_tokens(total, count);
}

// Of rewards that are not NaN; deviations are taken from the first of them.
struct Statistics {
    std::int64_t count;
    double first, mean_deviation, std;
};

template <class R>
Statistics statistics(const R* rewards, std::int64_t n, int ddof) noexcept {
    Statistics s{0, 0, NOT_A_NUMBER, NOT_A_NUMBER};
    double total = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const auto reward = static_cast<double>(rewards[i]);
        if (!std::isnan(reward)) {
            s.first = s.count == 0 ? reward : s.first;
            total += reward - s.first;
            ++s.count;
        }
    }
    if (s.count == 0) {
        return s;
    }
    s.mean_deviation = total / static_cast<double>(s.count);
    double squares = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const auto reward = static_cast<double>(rewards[i]);
        if (!std::isnan(reward)) {
            const double centered = reward - s.first - s.mean_deviation;
            squares += centered * centered;
        }
    }
    s.std = s.count > ddof ? std::sqrt(squares / static_cast<double>(s.count - ddof)) : 0;
    return s;
}

template <class R>
struct Columns {
    R *advantages, *base, *bonus, *eta, *scores, *mean, *std;

    explicit Columns(const AdvantageResults& r)
        : advantages(static_cast<R*>(r.advantages)), base(static_cast<R*>(r.base)),
          bonus(static_cast<R*>(r.bonus)), eta(static_cast<R*>(r.eta)),
          scores(static_cast<R*>(r.scores)), mean(static_cast<R*>(r.mean)),
          std(static_cast<R*>(r.std)) {}
};

// `scores` has room for the group.
template <class R>
void one_group(const AdvantageInputs& in, const Columns<R>& out, const Statistics* batch,
               std::int64_t begin, std::int64_t end, std::vector<Score>& scores) {
    const R* rewards = static_cast<const R*>(in.rewards);
    const Statistics group = statistics(rewards + begin, end - begin, in.ddof);
    const double std = batch == nullptr || group.count == 0 ? group.std : batch->std;
    double total_score = 0;
    std::int64_t num_scores = 0;
    scores.resize(static_cast<std::size_t>(end - begin));
    for (std::int64_t i = begin; i < end; ++i) {
        Score& score = scores[static_cast<std::size_t>(i - begin)];
        score = score_of_row(in, i);
        out.scores[i] = static_cast<R>(score.value);
        const bool is_excluded = in.exclude != nullptr && in.exclude[i];
        score.exists = score.exists && !is_excluded && !std::isnan(rewards[i]);
        total_score += score.exists ? score.value : 0;
        num_scores += score.exists;
    }
    const double mean_score = total_score / static_cast<double>(num_scores);
    const auto full_reward = static_cast<R>(in.full_reward);
    for (std::int64_t i = begin; i < end; ++i) {
        const Score& score = scores[static_cast<std::size_t>(i - begin)];
        const auto reward = static_cast<double>(rewards[i]);
        const double centered = reward - group.first - group.mean_deviation;
        const double scaled = in.scale == Scale::NONE ? centered : centered / (std + in.eps);
        const double base = std::isnan(reward) ? 0 : scaled;
        const double eta = score.exists ? std::exp(score.value - mean_score) : 1;
        const bool is_correct = in.correct != nullptr ? in.correct[i] : rewards[i] >= full_reward;
        double bonus = 0;
        if (is_correct && score.exists && base > 0) {
            bonus = std::min(std::max(in.novelty_weight * (1 - eta), 0.0), in.novelty_clip * base);
        }
        out.advantages[i] = static_cast<R>(base + bonus);
        out.base[i] = static_cast<R>(base);
        out.bonus[i] = static_cast<R>(bonus);
        out.eta[i] = static_cast<R>(eta);
        out.mean[i] = static_cast<R>(group.first + group.mean_deviation);
        out.std[i] = static_cast<R>(std);
    }
}

template <class R>
void advantages_of(const AdvantageInputs& in, const AdvantageResults& results) {
    const Columns<R> out(results);
    Statistics batch{};
    if (in.scale == Scale::BATCH) {
        batch = statistics(static_cast<const R*>(in.rewards), in.num_seqs, in.ddof);
    }
    const Statistics* of_batch = in.scale == Scale::BATCH ? &batch : nullptr;
    std::int64_t items = in.num_seqs;
    if (in.token_logprobs != nullptr) {
        items += in.token_mask != nullptr ? in.num_seqs * in.row_tokens : in.cu_seqlens[in.num_seqs];
    }
    const std::int64_t tasks = items < MIN_PARALLEL_ITEMS ? 1 : items / TASK_ITEMS;
    parallel_for(tasks, in.num_threads, [&](std::int64_t task) {
        std::vector<Score> scores;
        const std::int64_t last = in.num_groups * (task + 1) / tasks;
        for (std::int64_t g = in.num_groups * task / tasks; g < last; ++g) {
            one_group(in, out, of_batch, in.cu_groups[g], in.cu_groups[g + 1], scores);
        }
    });
}

}  // namespace

void xrpo_advantages_fwd(const AdvantageInputs& inputs, const AdvantageResults& results) {
    if (inputs.is_double) {
        advantages_of<double>(inputs, results);
    } else {
        advantages_of<float>(inputs, results);
    }
}

void sequence_logprobs_fwd(const void* token_logprobs, Dtype dtype, Offsets cu_seqlens,
                           std::int64_t num_seqs, bool is_mean, void* scores,
                           std::int64_t* lengths, int num_threads) {
    const std::int64_t items = num_seqs + cu_seqlens[num_seqs];
    const std::int64_t tasks = items < MIN_PARALLEL_ITEMS ? 1 : items / TASK_ITEMS;
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

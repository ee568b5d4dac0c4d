#include "advantages.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "logprobs_elements.hpp"
#include "thread_pool.hpp"

namespace xrpo {
namespace {

constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();
// Fewer rows or tokens than this are done before another thread wakes up.
constexpr std::int64_t MIN_PARALLEL_ITEMS = 1 << 15;
constexpr std::int64_t TASK_ITEMS = 1 << 12;

// Two doubles: every x86-64 and aarch64 CPU has them.
typedef double f64v __attribute__((vector_size(16)));
typedef std::int64_t i64v __attribute__((vector_size(16)));
constexpr std::int64_t LANES = 2;

// Flat arrays of doubles, an entry for each row of a task, readable a vector past the last row.
struct RowTerms {
    std::unique_ptr<double[]> storage;
    double *reward, *can_gain, *score, *takes_part;
    double *first, *mean_deviation, *inverse_std, *std, *mean_score;

    explicit RowTerms(std::int64_t n) {
        const std::int64_t padded = n + LANES;
        storage.reset(new double[static_cast<std::size_t>(9 * padded)]);
        double* next = storage.get();
        for (double** column : {&reward, &can_gain, &score, &takes_part, &first, &mean_deviation,
                                &inverse_std, &std, &mean_score}) {
            *column = next;
            std::fill(next + n, next + padded, 0.0);
            next += padded;
        }
    }
};

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

Score score_of_row(const AdvantageInputs& in, std::int64_t row) noexcept {
    if (in.scores != nullptr) {
        const double value = load_element(in.scores_dtype, in.scores, row);
        return {value, std::isfinite(value)};
    }
    return in.token_logprobs != nullptr ? token_score(in, row) : Score{0.0, false};
}

// What rows [begin, end) bring: reward, right to a bonus, score, and whether it takes part in
// novelty: scored, not excluded, finite score.
template <class R>
void load_rows(const AdvantageInputs& in, std::int64_t begin, std::int64_t end,
               const RowTerms& terms) noexcept {
    const R* rewards = static_cast<const R*>(in.rewards);
    const auto full_reward = static_cast<R>(in.full_reward);
    for (std::int64_t i = begin, k = 0; i < end; ++i, ++k) {
        const Score score = score_of_row(in, i);
        const bool is_excluded = in.exclude != nullptr && in.exclude[i];
        const bool takes_part = score.exists & (rewards[i] == rewards[i]) & !is_excluded;
        const bool is_correct = in.correct == nullptr ? rewards[i] >= full_reward : in.correct[i];
        terms.reward[k] = static_cast<double>(rewards[i]);
        terms.can_gain[k] = static_cast<double>(is_correct & takes_part);
        terms.score[k] = score.value;
        terms.takes_part[k] = static_cast<double>(takes_part);
    }
}

// Of rewards that are not NaN; deviations are taken from the first of them.
struct Statistics {
    std::int64_t count;
    double first, mean_deviation, std;
};

f64v load(const double* p) noexcept {
    f64v x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

double sum_lanes(f64v x) noexcept { return x[0] + x[1]; }

// All ones in the lanes of entries before n, of a vector that starts at entry k.
i64v lanes_before(std::int64_t n, std::int64_t k) noexcept {
    const f64v lane = {0, 1};
    return lane < static_cast<double>(n - k);
}

// Whole vectors, so that a group of a few rows is one step and not a loop: `rewards` is readable up
// to a multiple of LANES.
Statistics statistics(const double* rewards, std::int64_t n, int ddof) noexcept {
    Statistics s{0, 0, NOT_A_NUMBER, NOT_A_NUMBER};
    std::int64_t begin = 0;
    while (begin < n && rewards[begin] != rewards[begin]) {
        ++begin;
    }
    if (begin == n) {
        return s;
    }
    s.first = rewards[begin];
    f64v total = {}, count = {}, squares = {};
    const f64v zero = {};
    for (std::int64_t k = 0; k < n; k += LANES) {
        const f64v reward = load(rewards + k);
        const i64v counts = lanes_before(n, k) & (reward == reward);
        total += counts ? reward - s.first : zero;
        count += counts ? zero + 1.0 : zero;
    }
    s.count = static_cast<std::int64_t>(sum_lanes(count));
    s.mean_deviation = sum_lanes(total) / static_cast<double>(s.count);
    for (std::int64_t k = 0; k < n; k += LANES) {
        const f64v reward = load(rewards + k);
        const f64v centered = reward - s.first - s.mean_deviation;
        squares += lanes_before(n, k) & (reward == reward) ? centered * centered : zero;
    }
    const bool has_spread = s.count > ddof;
    s.std = has_spread ? std::sqrt(sum_lanes(squares) / static_cast<double>(s.count - ddof)) : 0;
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

// Statistics of the n rows from row `k` of the terms, one group, written to each of them. Whole
// vectors again: what is written past the group, the next group overwrites.
void reduce_group(const AdvantageInputs& in, const Statistics* batch, std::int64_t k,
                  std::int64_t n, const RowTerms& terms) noexcept {
    const Statistics group = statistics(terms.reward + k, n, in.ddof);
    const double std = batch == nullptr || group.count == 0 ? group.std : batch->std;
    // 0 where all deviations are 0 anyway: no row scored, or std and eps both 0.
    const double inverse_std = in.scale == Scale::NONE ? 1.0
                               : std + in.eps > 0      ? 1.0 / (std + in.eps)
                                                       : 0.0;
    f64v total_score = {}, num_scores = {};
    const f64v zero = {};
    for (std::int64_t j = 0; j < n; j += LANES) {
        const f64v takes_part = load(terms.takes_part + k + j);
        const i64v counts = lanes_before(n, j) & (takes_part != zero);
        total_score += counts ? load(terms.score + k + j) : zero;
        num_scores += counts ? takes_part : zero;
    }
    const double mean_score = sum_lanes(total_score) / sum_lanes(num_scores);
    const struct {
        double* column;
        double value;
    } fills[] = {{terms.first, group.first},
                 {terms.mean_deviation, group.mean_deviation},
                 {terms.inverse_std, inverse_std},
                 {terms.std, std},
                 {terms.mean_score, mean_score}};
    for (std::int64_t j = 0; j < n; j += LANES) {
        for (const auto& fill : fills) {
            const f64v value = zero + fill.value;
            std::memcpy(fill.column + k + j, &value, sizeof value);
        }
    }
}

template <class R>
void store(R* p, f64v x, std::int64_t n) noexcept {
    typedef R Rv __attribute__((vector_size(LANES * sizeof(R))));
    const Rv narrow = __builtin_convertvector(x, Rv);
    if (n >= LANES) {
        std::memcpy(p, &narrow, sizeof narrow);
    } else {
        std::memcpy(p, &narrow, static_cast<std::size_t>(n) * sizeof(R));
    }
}

f64v exp_for(f64v x, double) noexcept {
    for (std::int64_t i = 0; i < LANES; ++i) {
        x[i] = std::exp(x[i]);
    }
    return x;
}

// Relative error 2e-9: enough for a float, a fraction of the time of std::exp.
f64v exp_for(f64v x, float) noexcept {
    constexpr double LOG2_E = 1.4426950408889634074;
    constexpr double LN2_HIGH = 0x1.62e42fefa3800p-1, LN2_LOW = 0x1.ef35793c76730p-45;
    constexpr double SHIFTER = 0x1.8p52;  // adding it rounds, and leaves n in the low bits
    constexpr double LIMIT = 700;         // beyond, float is infinite or 0 anyway
    x = x > LIMIT ? f64v{} + LIMIT : x;
    x = x < -LIMIT ? f64v{} - LIMIT : x;
    const f64v shifted = x * LOG2_E + SHIFTER, n = shifted - SHIFTER;
    const f64v r = (x - n * LN2_HIGH) - n * LN2_LOW;
    f64v y = r * 0.0013843644280737092 + 0.008374163481198182;
    y = y * r + 0.04166800257710802;
    y = y * r + 0.16666431168934323;
    y = y * r + 0.4999999420553261;
    y = y * r + 1.0000000321840243;
    y = y * r + 1.0;
    return (f64v)((i64v)y + ((i64v)shifted << 52));
}

template <class R>
void finish_rows(const AdvantageInputs& in, const Columns<R>& out, std::int64_t begin,
                 std::int64_t end, const RowTerms& t) noexcept {
    const f64v zero = {};
    for (std::int64_t k = 0; k < end - begin; k += LANES) {
        const std::int64_t i = begin + k, n = end - i;
        const f64v reward = load(t.reward + k), first = load(t.first + k);
        const f64v mean_deviation = load(t.mean_deviation + k), score = load(t.score + k);
        const f64v scaled = (reward - first - mean_deviation) * load(t.inverse_std + k);
        const f64v base = reward == reward ? scaled : zero;
        const f64v log_eta = load(t.takes_part + k) != zero ? score - load(t.mean_score + k) : zero;
        const f64v eta = exp_for(log_eta, R{});
        const f64v wanted = in.novelty_weight * (1.0 - eta), cap = in.novelty_clip * base;
        const f64v least = wanted < cap ? wanted : cap;
        const f64v allowed = load(t.can_gain + k) != zero ? least : zero;
        // Where it is above 0, so are the wanted bonus and base.
        const f64v bonus = allowed > zero ? allowed : zero;
        store(out.advantages + i, base + bonus, n);
        store(out.base + i, base, n);
        store(out.bonus + i, bonus, n);
        store(out.eta + i, eta, n);
        store(out.scores + i, score, n);
        store(out.mean + i, first + mean_deviation, n);
        store(out.std + i, load(t.std + k), n);
    }
}

template <class R>
void advantages_of(const AdvantageInputs& in, const AdvantageResults& results) {
    const Columns<R> out(results);
    Statistics batch{};
    if (in.scale == Scale::BATCH) {
        const R* rewards = static_cast<const R*>(in.rewards);
        std::vector<double> all(static_cast<std::size_t>(in.num_seqs + LANES));
        std::copy(rewards, rewards + in.num_seqs, all.begin());
        batch = statistics(all.data(), in.num_seqs, in.ddof);
    }
    const Statistics* of_batch = in.scale == Scale::BATCH ? &batch : nullptr;
    std::int64_t items = in.num_seqs;
    if (in.token_logprobs != nullptr) {
        items += in.token_mask != nullptr ? in.num_seqs * in.row_tokens : in.cu_seqlens[in.num_seqs];
    }
    const std::int64_t tasks = items < MIN_PARALLEL_ITEMS ? 1 : items / TASK_ITEMS;
    parallel_for(tasks, in.num_threads, [&](std::int64_t task) {
        const std::int64_t first_group = in.num_groups * task / tasks;
        const std::int64_t last_group = in.num_groups * (task + 1) / tasks;
        const std::int64_t begin = in.cu_groups[first_group], end = in.cu_groups[last_group];
        RowTerms terms(end - begin);
        load_rows<R>(in, begin, end, terms);
        for (std::int64_t g = first_group; g < last_group; ++g) {
            const std::int64_t row = in.cu_groups[g];
            reduce_group(in, of_batch, row - begin, in.cu_groups[g + 1] - row, terms);
        }
        finish_rows(in, out, begin, end, terms);
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

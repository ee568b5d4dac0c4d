// The row kernels of the advantages, in vectors of XRPO_LANES doubles. Included once per instruction
// set, by a file that has chosen the target, the lanes and the namespace XRPO_ISA.

namespace xrpo {
namespace XRPO_ISA {

typedef double f64v __attribute__((vector_size(8 * XRPO_LANES)));
typedef std::int64_t i64v __attribute__((vector_size(8 * XRPO_LANES)));
constexpr std::int64_t LANES = XRPO_LANES;
constexpr double NOT_A_NUMBER = __builtin_nan("");

static inline f64v splat(double x) { return x - f64v{}; }

static inline f64v load_vector(const double* p) {
    f64v x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

static inline double sum_lanes(const f64v& x) {
#if XRPO_LANES == 4
    return (x[0] + x[2]) + (x[1] + x[3]);
#else
    return x[0] + x[1];
#endif
}

// All ones in the lanes of entries before n, of a vector that starts at entry k.
static inline i64v lanes_before(std::int64_t n, std::int64_t k) {
    f64v lane;
    for (int i = 0; i < XRPO_LANES; ++i) {
        lane[i] = i;
    }
    return lane < splat(static_cast<double>(n - k));
}

static inline std::int64_t steps_end(std::int64_t n) { return n <= SHORT_GROUP ? SHORT_GROUP : n; }

template <class R>
static void load_rows(const AdvantageInputs& in, std::int64_t begin, std::int64_t end,
                      const RowTerms& t) {
    const R* rewards = static_cast<const R*>(in.rewards) + begin;
    const std::int64_t n = end - begin;
    const auto full_reward = static_cast<double>(static_cast<R>(in.full_reward));
    double* __restrict reward = t.reward;
    double* __restrict takes_part = t.takes_part;
    double* __restrict can_gain = t.can_gain;
    for (std::int64_t k = 0; k < n; ++k) {
        reward[k] = static_cast<double>(rewards[k]);
    }
    for (std::int64_t k = 0; k < n; ++k) {
        takes_part[k] = reward[k] == reward[k] ? takes_part[k] : 0.0;
    }
    if (in.exclude != nullptr) {
        for (std::int64_t k = 0; k < n; ++k) {
            takes_part[k] = in.exclude[begin + k] ? 0.0 : takes_part[k];
        }
    }
    if (in.correct == nullptr) {
        for (std::int64_t k = 0; k < n; ++k) {
            can_gain[k] = reward[k] >= full_reward ? takes_part[k] : 0.0;
        }
    } else {
        for (std::int64_t k = 0; k < n; ++k) {
            can_gain[k] = in.correct[begin + k] ? takes_part[k] : 0.0;
        }
    }
}

static inline Statistics statistics(const double* rewards, std::int64_t n, int ddof) {
    Statistics s{0, 0, NOT_A_NUMBER, NOT_A_NUMBER};
    std::int64_t begin = 0;
    while (begin < n && rewards[begin] != rewards[begin]) {
        ++begin;
    }
    if (begin == n) {
        return s;
    }
    s.first = rewards[begin];
    const f64v zero = {};
    f64v total = {}, count = {}, squares = {};
    const std::int64_t end = steps_end(n);
    for (std::int64_t k = 0; k < end; k += LANES) {
        const f64v reward = load_vector(rewards + k);
        const i64v counts = lanes_before(n, k) & (reward == reward);
        total += counts ? reward - s.first : zero;
        count += counts ? splat(1.0) : zero;
    }
    s.count = static_cast<std::int64_t>(sum_lanes(count));
    s.mean_deviation = sum_lanes(total) / static_cast<double>(s.count);
    for (std::int64_t k = 0; k < end; k += LANES) {
        const f64v reward = load_vector(rewards + k);
        const f64v centered = reward - s.first - s.mean_deviation;
        squares += lanes_before(n, k) & (reward == reward) ? centered * centered : zero;
    }
    const bool has_spread = s.count > ddof;
    s.std = has_spread ? __builtin_sqrt(sum_lanes(squares) / static_cast<double>(s.count - ddof)) : 0;
    return s;
}

// What is written past the group, the next group overwrites.
static void reduce_group(const AdvantageInputs& in, const Statistics* batch, std::int64_t k,
                         std::int64_t n, const RowTerms& t) {
    const Statistics group = statistics(t.reward + k, n, in.ddof);
    const double std = batch == nullptr || group.count == 0 ? group.std : batch->std;
    // 0 where all deviations are 0 anyway: no row scored, or std and eps both 0.
    const double inverse_std = in.scale == Scale::NONE ? 1.0
                               : std + in.eps > 0      ? 1.0 / (std + in.eps)
                                                       : 0.0;
    const f64v zero = {};
    f64v total_score = {}, num_scores = {};
    const std::int64_t end = steps_end(n);
    for (std::int64_t j = 0; j < end; j += LANES) {
        const f64v takes_part = load_vector(t.takes_part + k + j);
        const i64v counts = lanes_before(n, j) & (takes_part != zero);
        total_score += counts ? load_vector(t.score + k + j) : zero;
        num_scores += counts ? takes_part : zero;
    }
    const double mean_score = sum_lanes(total_score) / sum_lanes(num_scores);
    const f64v first = splat(group.first), mean_deviation = splat(group.mean_deviation);
    const f64v inverse = splat(inverse_std), deviation = splat(std), mean = splat(mean_score);
    for (std::int64_t j = k; j < k + end; j += LANES) {
        std::memcpy(t.first + j, &first, sizeof first);
        std::memcpy(t.mean_deviation + j, &mean_deviation, sizeof mean_deviation);
        std::memcpy(t.inverse_std + j, &inverse, sizeof inverse);
        std::memcpy(t.std + j, &deviation, sizeof deviation);
        std::memcpy(t.mean_score + j, &mean, sizeof mean);
    }
}

// The first n lanes; all of them where n is not less.
template <class R>
static inline void store(void* column, std::int64_t i, const f64v& x, std::int64_t n) {
    typedef R Rv __attribute__((vector_size(sizeof(R) * XRPO_LANES)));
    R* p = static_cast<R*>(column) + i;
    if (n >= LANES) {
        const Rv narrow = __builtin_convertvector(x, Rv);
        std::memcpy(p, &narrow, sizeof narrow);
    } else {
        for (std::int64_t lane = 0; lane < n; ++lane) {
            p[lane] = static_cast<R>(x[lane]);
        }
    }
}

static inline f64v exp_for(f64v x, double) {
    for (std::int64_t i = 0; i < LANES; ++i) {
        x[i] = __builtin_exp(x[i]);
    }
    return x;
}

// Relative error 2e-9: enough for a float, a fraction of the time of exp.
static inline f64v exp_for(f64v x, float) {
    constexpr double LOG2_E = 1.4426950408889634074;
    constexpr double LN2_HIGH = 0x1.62e42fefa3800p-1, LN2_LOW = 0x1.ef35793c76730p-45;
    constexpr double SHIFTER = 0x1.8p52;  // adding it rounds, and leaves n in the low bits
    constexpr double LIMIT = 700;         // beyond, float is infinite or 0 anyway
    x = x > LIMIT ? splat(LIMIT) : x;
    x = x < -LIMIT ? splat(-LIMIT) : x;
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

// Row i of the results, and the next lanes up to n in all, from row k of the terms.
template <class R>
static inline void finish_vector(const AdvantageInputs& in, const AdvantageResults& out,
                                 std::int64_t i, std::int64_t n, std::int64_t k,
                                 const RowTerms& t) {
    const f64v zero = {};
    const f64v reward = load_vector(t.reward + k), first = load_vector(t.first + k);
    const f64v mean_deviation = load_vector(t.mean_deviation + k);
    const f64v score = load_vector(t.score + k), mean_score = load_vector(t.mean_score + k);
    const f64v scaled = (reward - first - mean_deviation) * load_vector(t.inverse_std + k);
    const f64v base = reward == reward ? scaled : zero;
    const f64v log_eta = load_vector(t.takes_part + k) != zero ? score - mean_score : zero;
    const f64v eta = exp_for(log_eta, R{});
    const f64v wanted = in.novelty_weight * (1.0 - eta), cap = in.novelty_clip * base;
    const f64v least = wanted < cap ? wanted : cap;
    const f64v allowed = load_vector(t.can_gain + k) != zero ? least : zero;
    // Where it is above 0, so are the wanted bonus and base.
    const f64v bonus = allowed > zero ? allowed : zero;
    store<R>(out.advantages, i, base + bonus, n);
    store<R>(out.base, i, base, n);
    store<R>(out.bonus, i, bonus, n);
    store<R>(out.eta, i, eta, n);
    store<R>(out.scores, i, score, n);
    store<R>(out.mean, i, first + mean_deviation, n);
    store<R>(out.std, i, load_vector(t.std + k), n);
}

template <class R>
static void finish_rows(const AdvantageInputs& in, const AdvantageResults& out, std::int64_t begin,
                        std::int64_t end, const RowTerms& t) {
    std::int64_t k = 0;
    for (; k + LANES <= end - begin; k += LANES) {
        finish_vector<R>(in, out, begin + k, LANES, k, t);
    }
    if (k < end - begin) {
        finish_vector<R>(in, out, begin + k, end - begin - k, k, t);
    }
}

static void load(const AdvantageInputs& in, std::int64_t begin, std::int64_t end,
                 const RowTerms& terms) {
    in.is_double ? load_rows<double>(in, begin, end, terms)
                 : load_rows<float>(in, begin, end, terms);
}

static void finish(const AdvantageInputs& in, const AdvantageResults& out, std::int64_t begin,
                   std::int64_t end, const RowTerms& terms) {
    in.is_double ? finish_rows<double>(in, out, begin, end, terms)
                 : finish_rows<float>(in, out, begin, end, terms);
}

}  // namespace XRPO_ISA
}  // namespace xrpo

#include "logprobs.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "logprobs_elements.hpp"
#include "thread_pool.hpp"

namespace xrpo {
namespace {

// A tile is read twice, for its max and for its sum: it stays in the first-level cache.
constexpr std::int64_t TILE = 4096;
// Columns of one task of the gradient.
constexpr std::int64_t SPAN = 8 * TILE;
// A task is worth a thread's attention from here on.
constexpr std::int64_t MIN_TASK_ELEMENTS = 1 << 15;
// Larger outputs do not fit the caches of today: store past them.
constexpr std::int64_t MIN_STREAMING_BYTES = std::int64_t{8} << 20;
// Outside, the float kernels would leave the range of float: the exact path in double takes over.
constexpr double MIN_FAST_TEMPERATURE = 1e-30, MAX_FAST_TEMPERATURE = 1e30;
constexpr double LOG2_E = 1.4426950408889634074;
constexpr double INF = std::numeric_limits<double>::infinity();
constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

const TileKernels& kernels_for(const std::string& limit) noexcept {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 =
        has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && limit == "avx512") {
        return avx512_tile_kernels();
    }
    if (has_avx2 && limit != "base") {
        return avx2_tile_kernels();
    }
#else
    (void)limit;
#endif
    return base_tile_kernels();
}

const TileKernels* kernels = &kernels_for("avx512");

enum class RowState { VALID, UNSCORED, BAD_LABEL };

struct Row {
    RowState state;
    const void* logits;
    std::int64_t label;
    double temperature;
    bool is_exact;  // in double, element by element
};


Row row_at(const LogprobRows& rows, std::int64_t r) noexcept {
    Row row{};
    if (rows.mask != nullptr && !rows.mask[r]) {
        row.state = RowState::UNSCORED;
        return row;
    }
    row.label = rows.labels_are_int64 ? static_cast<const std::int64_t*>(rows.labels)[r]
                                      : static_cast<const std::int32_t*>(rows.labels)[r];
    const bool is_in_range = row.label >= 0 && row.label < rows.vocab_size;
    row.state = is_in_range ? RowState::VALID : RowState::BAD_LABEL;
    row.logits = advance(rows.logits, rows.dtype, r * rows.row_stride);
    row.temperature = rows.temperatures == nullptr
                          ? rows.temperature
                          : static_cast<double>(rows.temperatures[r * rows.temperature_stride]);
    row.is_exact = rows.dtype == Dtype::F64 || row.temperature < MIN_FAST_TEMPERATURE ||
                   row.temperature > MAX_FAST_TEMPERATURE;
    return row;
}

ExpScale exp_scale(double temperature) noexcept {
    const double scale = LOG2_E / temperature;
    return {static_cast<float>(scale), static_cast<float>(-126.0 / scale)};
}

TileStats exact_stats(Dtype dtype, const void* x, std::int64_t n, double temperature) noexcept {
    TileStats stats{-INF, 0, 0};
    for (std::int64_t i = 0; i < n; ++i) {
        stats.max = std::max(stats.max, load_element(dtype, x, i));
    }
    const double max = stats.max == -INF ? 0 : stats.max;
    for (std::int64_t i = 0; i < n; ++i) {
        const double d = load_element(dtype, x, i) - max;
        const double e = std::exp(d / temperature);
        stats.sum += e;
        stats.weighted += e == 0 ? 0 : e * d;
    }
    return stats;
}

TileStats stats_of_tile(const LogprobRows& rows, const Row& row, std::int64_t tile,
                        bool with_weighted, bool apart) noexcept {
    const std::int64_t begin = tile * TILE, n = std::min(TILE, rows.vocab_size - begin);
    const void* x = advance(row.logits, rows.dtype, begin);
    return row.is_exact ? exact_stats(rows.dtype, x, n, row.temperature)
                        : kernels->stats(rows.dtype, x, n, exp_scale(row.temperature),
                                         with_weighted, apart);
}

// The tiles of a row, put together in their order; those that hold its max are taken again.
TileStats combine(const LogprobRows& rows, const Row& row, TileStats* tiles,
                  std::int64_t num_tiles, bool with_weighted) noexcept {
    TileStats whole{-INF, 0, 0};
    for (std::int64_t i = 0; i < num_tiles; ++i) {
        whole.max = std::max(whole.max, tiles[i].max);
    }
    for (std::int64_t i = 0; i < num_tiles; ++i) {
        if (tiles[i].max == whole.max && std::isfinite(tiles[i].sum) && !row.is_exact) {
            tiles[i] = stats_of_tile(rows, row, i, with_weighted, true);
        }
        const double below = tiles[i].max - whole.max;
        const double weight = std::exp(below / row.temperature);
        whole.sum += weight * tiles[i].sum;
        if (weight != 0) {
            whole.weighted += weight * (tiles[i].weighted + below * tiles[i].sum);
        }
    }
    return whole;
}

void store_row(const LogprobRows& rows, const LogprobResults& results, std::int64_t r,
               const Row& row, TileStats* tiles, std::int64_t num_tiles) noexcept {
    double logprob = 0, entropy = 0, max = 0, sum = 1;
    if (row.state == RowState::BAD_LABEL) {
        logprob = entropy = NOT_A_NUMBER;
    } else if (row.state == RowState::VALID) {
        const bool with_entropy = results.entropy != nullptr;
        const TileStats stats = combine(rows, row, tiles, num_tiles, with_entropy);
        max = stats.max;
        sum = stats.sum;
        const double log_sum = std::log(sum);
        logprob =
            (load_element(rows.dtype, row.logits, row.label) - max) / row.temperature - log_sum;
        entropy = log_sum - stats.weighted / (row.temperature * sum);
    }
    store_stat(rows.dtype, results.logprobs, r, logprob);
    store_stat(rows.dtype, results.row_max, r, max);
    results.row_sum[r] = sum;
    if (results.entropy != nullptr) {
        store_stat(rows.dtype, results.entropy, r, entropy);
    }
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

// Fewer rows than threads can share: the tiles are the tasks.
void forward_by_tile(const LogprobRows& rows, const LogprobResults& results,
                     std::int64_t num_tiles) {
    std::vector<TileStats> tiles(static_cast<std::size_t>(rows.num_rows * num_tiles));
    parallel_for(rows.num_rows * num_tiles, rows.num_threads, [&](std::int64_t task) {
        const Row row = row_at(rows, task / num_tiles);
        if (row.state == RowState::VALID) {
            tiles[static_cast<std::size_t>(task)] =
                stats_of_tile(rows, row, task % num_tiles, results.entropy != nullptr, false);
        }
    });
    for (std::int64_t r = 0; r < rows.num_rows; ++r) {
        store_row(rows, results, r, row_at(rows, r), tiles.data() + r * num_tiles, num_tiles);
    }
}

void forward_by_row(const LogprobRows& rows, const LogprobResults& results,
                    std::int64_t num_tiles) {
    const std::int64_t grain = ceil_div(MIN_TASK_ELEMENTS, rows.vocab_size);
    parallel_for(ceil_div(rows.num_rows, grain), rows.num_threads, [&](std::int64_t task) {
        std::vector<TileStats> tiles(static_cast<std::size_t>(num_tiles));
        const std::int64_t end = std::min(rows.num_rows, (task + 1) * grain);
        for (std::int64_t r = task * grain; r < end; ++r) {
            const Row row = row_at(rows, r);
            if (row.state == RowState::VALID) {
                for (std::int64_t i = 0; i < num_tiles; ++i) {
                    tiles[static_cast<std::size_t>(i)] =
                        stats_of_tile(rows, row, i, results.entropy != nullptr, false);
                }
            }
            store_row(rows, results, r, row, tiles.data(), num_tiles);
        }
    });
}

// Of one row: dx_v = exp((x_v - max) / T) (constant + slope (x_v - max)), and at the label `at_label`.
struct RowGradient {
    bool is_zero;
    double max, constant, slope, at_label;
};

RowGradient row_gradient(const LogprobRows& rows, const LogprobGradients& gradients,
                         const Row& row, std::int64_t r) noexcept {
    RowGradient result{true, 0, 0, 0, 0};
    if (row.state != RowState::VALID) {
        return result;
    }
    const double g = load_stat(rows.dtype, gradients.dlogprobs, r);
    const double ge =
        gradients.dentropy == nullptr ? 0 : load_stat(rows.dtype, gradients.dentropy, r);
    if (g == 0 && ge == 0) {
        return result;
    }
    result.is_zero = false;
    result.max = load_stat(rows.dtype, gradients.row_max, r);
    const double temperature = row.temperature, sum = gradients.row_sum[r];
    const double mean_z = ge == 0 ? 0 : std::log(sum) - load_stat(rows.dtype, gradients.entropy, r);
    result.constant = (ge * mean_z - g) / (temperature * sum);
    result.slope = -ge / (temperature * temperature * sum);
    const double z = (load_element(rows.dtype, row.logits, row.label) - result.max) / temperature;
    const double e = std::exp(z);
    const double of_entropy = e == 0 ? 0 : ge * e * (mean_z - z);
    result.at_label = (g * (sum - e) + of_entropy) / (temperature * sum);
    return result;
}

void exact_gradient(Dtype dtype, const void* x, void* out, std::int64_t n, double temperature,
                    const RowGradient& row) noexcept {
    for (std::int64_t i = 0; i < n; ++i) {
        const double d = load_element(dtype, x, i) - row.max;
        const double e = std::exp(d / temperature);
        // Keeps a NaN of the row, drops 0 * infinity.
        const double factor = row.slope == 0 || e == 0 ? row.constant : row.constant + row.slope * d;
        store_element(dtype, out, i, e * factor);
    }
}

// Columns [begin, end) of one row.
void backward_span(const LogprobRows& rows, const LogprobGradients& gradients, std::int64_t r,
                   std::int64_t begin, std::int64_t end, bool streaming) noexcept {
    const Row row = row_at(rows, r);
    const RowGradient gradient = row_gradient(rows, gradients, row, r);
    void* out = advance(gradients.dlogits, rows.dtype, r * gradients.row_stride);
    const std::int64_t live_end = gradient.is_zero ? begin : std::min(end, rows.vocab_size);
    const std::int64_t n = std::max<std::int64_t>(live_end - begin, 0);
    if (n > 0) {
        const void* x = advance(row.logits, rows.dtype, begin);
        void* to = advance(out, rows.dtype, begin);
        const GradientScale scale = {exp_scale(row.temperature), static_cast<float>(gradient.max),
                                     static_cast<float>(gradient.constant),
                                     static_cast<float>(gradient.slope)};
        // A row with NaN or infinite logits or gradients is rare, and the float kernels do not know it.
        if (row.is_exact || !std::isfinite(scale.constant) || !std::isfinite(scale.slope)) {
            exact_gradient(rows.dtype, x, to, n, row.temperature, gradient);
        } else {
            kernels->gradient(rows.dtype, x, to, n, scale, gradient.slope != 0, streaming);
        }
        if (row.label >= begin && row.label < begin + n) {
            store_element(rows.dtype, out, row.label, gradient.at_label);
        }
    }
    std::memset(advance(out, rows.dtype, begin + n), 0,
                static_cast<std::size_t>((end - begin - n) * element_bytes(rows.dtype)));
}

}  // namespace

void token_logprobs_fwd(const LogprobRows& rows, const LogprobResults& results) {
    const std::int64_t num_tiles = ceil_div(rows.vocab_size, TILE);
    if (rows.num_rows < 2 * rows.num_threads && num_tiles > 1) {
        forward_by_tile(rows, results, num_tiles);
    } else {
        forward_by_row(rows, results, num_tiles);
    }
}

void token_logprobs_bwd(const LogprobRows& rows, const LogprobGradients& gradients) {
    const std::int64_t columns = rows.num_columns, spans = ceil_div(columns, SPAN);
    const std::int64_t bytes = rows.num_rows * columns * element_bytes(rows.dtype);
    const bool streaming = gradients.dlogits != rows.logits && bytes >= MIN_STREAMING_BYTES;
    const std::int64_t grain = ceil_div(MIN_TASK_ELEMENTS, std::min(columns, SPAN));
    const std::int64_t num_spans = rows.num_rows * spans;
    parallel_for(ceil_div(num_spans, grain), rows.num_threads, [&](std::int64_t task) {
        const std::int64_t last = std::min(num_spans, (task + 1) * grain);
        for (std::int64_t i = task * grain; i < last; ++i) {
            const std::int64_t begin = i % spans * SPAN;
            backward_span(rows, gradients, i / spans, begin, std::min(columns, begin + SPAN),
                          streaming);
        }
    });
}

const char* logprob_isa() noexcept { return kernels->name; }

void limit_logprob_isa(const char* limit) {
    const std::string name = limit;
    if (name != "avx512" && name != "avx2" && name != "base") {
        throw std::invalid_argument("limit: expected avx512, avx2 or base, got " + name);
    }
    kernels = &kernels_for(name);
}

}  // namespace xrpo

// What the row kernels of the advantages take and give; one table per instruction set.
#pragma once

#include <cstdint>

#include "advantages.hpp"

namespace xrpo {

// Groups up to this size are one fixed sequence of steps: a loop of unknown length costs more.
constexpr std::int64_t SHORT_GROUP = 16;

// Flat arrays of doubles, an entry for each row of a task; SHORT_GROUP more may be touched.
struct RowTerms {
    static constexpr int NUM_COLUMNS = 9;
    double *reward, *score, *takes_part, *can_gain;
    double *first, *mean_deviation, *inverse_std, *std, *mean_score;
};

// Of rewards that are not NaN; deviations are taken from the first of them.
struct Statistics {
    std::int64_t count;
    double first, mean_deviation, std;
};

struct RowKernels {
    // Rewards as double, and who takes part in novelty and may gain; scores and in.exclude are there.
    void (*load)(const AdvantageInputs& in, std::int64_t begin, std::int64_t end,
                 const RowTerms& terms);
    // n rewards, readable up to SHORT_GROUP further.
    Statistics (*statistics)(const double* rewards, std::int64_t n, int ddof);
    // Statistics of the n rows from row k of the terms, one group, to each of its rows.
    void (*reduce)(const AdvantageInputs& in, const Statistics* batch, std::int64_t k,
                   std::int64_t n, const RowTerms& terms);
    void (*finish)(const AdvantageInputs& in, const AdvantageResults& out, std::int64_t begin,
                   std::int64_t end, const RowTerms& terms);
};

const RowKernels& base_row_kernels() noexcept;
#if defined(__x86_64__)
const RowKernels& avx2_row_kernels() noexcept;
#endif

}  // namespace xrpo

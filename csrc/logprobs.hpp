// Log-probs of given labels from rows of logits, and their gradient. See kernels/reference.py for
// the formulas and the meaning of every corner.
#pragma once

#include <cstdint>

#include "logprobs_tiles.hpp"

namespace xrpo {

// Rows of logits and what belongs to each row; null where absent.
struct LogprobRows {
    const void* logits;
    Dtype dtype;
    std::int64_t row_stride;  // elements
    std::int64_t num_rows, num_columns;
    std::int64_t vocab_size;  // columns from here on are padding
    const void* labels;
    bool labels_are_int64;
    double temperature;
    const float* temperatures;         // instead of temperature
    std::int64_t temperature_stride;   // 0: one for all rows
    const bool* mask;
    int num_threads;
};

// Per row: float, or double for F64 logits; row_sum is always double.
struct LogprobResults {
    void* logprobs;
    void* entropy;  // null: not wanted
    void* row_max;
    double* row_sum;
};

struct LogprobGradients {
    const void* dlogprobs;
    const void* dentropy;  // null: none
    const void* row_max;
    const double* row_sum;
    const void* entropy;  // with dentropy
    void* dlogits;        // may be the logits
    std::int64_t row_stride;
};

void token_logprobs_fwd(const LogprobRows& rows, const LogprobResults& results);
void token_logprobs_bwd(const LogprobRows& rows, const LogprobGradients& gradients);

// The instruction set in use: "avx512", "avx2" or "base". `limit` forbids better ones (tests).
const char* logprob_isa() noexcept;
void limit_logprob_isa(const char* limit);

}  // namespace xrpo

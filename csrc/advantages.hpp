// Group statistics, novelty and advantages over ragged groups, and scores of packed sequences. See
// kernels/reference.py for the formulas and the meaning of every corner.
#pragma once

#include <cstdint>

#include "logprobs_tiles.hpp"

namespace xrpo {

// Offsets into rows or tokens, int32 or int64.
struct Offsets {
    const void* values;
    bool are_int64;

    std::int64_t operator[](std::int64_t i) const noexcept {
        return are_int64 ? static_cast<const std::int64_t*>(values)[i]
                         : static_cast<const std::int32_t*>(values)[i];
    }
};

enum class Scale { GROUP = 0, BATCH = 1, NONE = 2 };

// Null where absent. The score of a row is given, or the mean of its token log-probs: packed with
// cu_seqlens, or (num_seqs, row_tokens) with token_mask.
struct AdvantageInputs {
    const void* rewards;
    bool is_double;  // rewards and results; else float
    std::int64_t num_seqs;
    Offsets cu_groups;
    std::int64_t num_groups;
    const void* scores;
    Dtype scores_dtype;
    const void* token_logprobs;
    Dtype token_dtype;
    Offsets cu_seqlens;
    const bool* token_mask;
    std::int64_t row_tokens;
    const bool* correct;
    double full_reward;
    const bool* exclude;
    double novelty_weight, novelty_clip;
    Scale scale;
    int ddof;
    double eps;
    int num_threads;
};

struct AdvantageResults {
    void *advantages, *base, *bonus, *eta, *scores, *mean, *std;
};

void xrpo_advantages_fwd(const AdvantageInputs& inputs, const AdvantageResults& results);

// scores: float, or double for F64.
void sequence_logprobs_fwd(const void* token_logprobs, Dtype dtype, Offsets cu_seqlens,
                           std::int64_t num_seqs, bool is_mean, void* scores,
                           std::int64_t* lengths, int num_threads);

}  // namespace xrpo

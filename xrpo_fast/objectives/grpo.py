"""GRPO (arXiv 2402.03300): token ratios, mean of sequence means."""

from xrpo_fast.objectives.common import (
    LossInputs,
    LossOutput,
    LossScale,
    clipped_terms,
    mean_of_sequence_means,
    token_ratio,
)

aggregate = mean_of_sequence_means


def loss(inputs: LossInputs, scale: LossScale) -> LossOutput:
    """- mean_i (1/L_i) sum_t min(r_t A, clip(r_t, 1-e, 1+e) A), r_t = exp(logp - logp_old)."""
    terms, low, high = clipped_terms(token_ratio(inputs), inputs, scale)
    return LossOutput(loss=aggregate(terms, inputs, scale), clipped_low=low, clipped_high=high)

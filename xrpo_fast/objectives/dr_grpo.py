"""Dr. GRPO (arXiv 2503.20783): GRPO's terms over a constant length; no division by the std."""

from xrpo_fast.objectives.common import (
    LossInputs,
    LossOutput,
    LossScale,
    clipped_terms,
    constant_length_mean,
    token_ratio,
)

aggregate = constant_length_mean


def loss(inputs: LossInputs, scale: LossScale) -> LossOutput:
    """- (1/N) sum_i (1/C) sum_t min(r_t A, clip(r_t) A), C = the response limit."""
    terms, low, high = clipped_terms(token_ratio(inputs), inputs, scale)
    return LossOutput(loss=aggregate(terms, inputs, scale), clipped_low=low, clipped_high=high)

"""DAPO (arXiv 2503.14476): GRPO's terms, asymmetric clip, mean over the mini-batch's tokens."""

from xrpo_fast.objectives.common import (
    LossInputs,
    LossOutput,
    LossScale,
    clipped_terms,
    token_mean,
    token_ratio,
)

aggregate = token_mean


def loss(inputs: LossInputs, scale: LossScale) -> LossOutput:
    """- (1/M) sum_i sum_t min(r_t A, clip(r_t, 1-low, 1+high) A), M = tokens of the mini-batch."""
    terms, low, high = clipped_terms(token_ratio(inputs), inputs, scale)
    return LossOutput(loss=aggregate(terms, inputs, scale), clipped_low=low, clipped_high=high)

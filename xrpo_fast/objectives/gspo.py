"""GSPO (arXiv 2507.18071): one ratio per sequence, the geometric mean of its token ratios."""

from xrpo_fast.objectives.common import (
    LossInputs,
    LossOutput,
    LossScale,
    clipped_terms,
    mean_of_sequence_means,
    sequence_ratio,
)

aggregate = mean_of_sequence_means


def loss(inputs: LossInputs, scale: LossScale) -> LossOutput:
    """- mean_i min(s_i A_i, clip(s_i) A_i), s_i = exp((1/L_i) sum_t (logp - logp_old))."""
    ratio = sequence_ratio(inputs)[inputs.row_index]
    terms, low, high = clipped_terms(ratio, inputs, scale)
    return LossOutput(loss=aggregate(terms, inputs, scale), clipped_low=low, clipped_high=high)

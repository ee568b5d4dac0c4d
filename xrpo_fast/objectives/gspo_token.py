"""GSPO-token (arXiv 2507.18071): the sequence's ratio as value, the token's gradient."""

import torch

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
    """- mean_i (1/L_i) sum_t min(s_it A, clip(s_it) A), s_it = sg[s_i] p_t / sg[p_t]."""
    own = torch.exp(inputs.token_logprobs - inputs.token_logprobs.detach())
    ratio = sequence_ratio(inputs).detach()[inputs.row_index] * own
    terms, low, high = clipped_terms(ratio, inputs, scale)
    return LossOutput(loss=aggregate(terms, inputs, scale), clipped_low=low, clipped_high=high)

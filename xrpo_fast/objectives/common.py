"""What every loss takes and returns, and the reductions they share.

Dimensions: S sequences (rollouts) of a micro-batch, T packed tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SHAPING_OFFSET = 0.1
"""gamma of p / (p + gamma), the weight of shaped tokens (arXiv 2510.26519)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LossInputs:
    """One micro-batch, packed, on the trainer's device."""

    token_logprobs: Tensor
    """(T,) float32, nats, log pi_theta of the sampled tokens; differentiable."""
    old_logprobs: Tensor
    """(T,) float32, nats, log pi_old under the same prompt; detached."""
    advantages: Tensor
    """(T,) float32, unitless; constant over a sequence."""
    row_weights: Tensor
    """(S,) float32, w of loss.group_weight."""
    row_index: Tensor
    """(T,) int64, the sequence of each token."""
    lengths: Tensor
    """(S,) float32, scored tokens of each sequence; at least 1."""
    mismatch_weights: Tensor | None = None
    """(T,) float32, min(p_trainer / p_sampler, 2); None without correction."""
    is_shaped: Tensor | None = None
    """(T,) bool, tokens with the ratio p / (p + 0.1) and no clip; None where there are none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LossScale:
    """Constants of the loss, with the whole mini-batch's denominators."""

    clip_low: float
    clip_high: float
    dual_clip: float
    num_rows: float
    """Sum of the row weights over all rows of the mini-batch, skipped ones included."""
    num_tokens: float
    """Sum of row weight times length, likewise."""
    max_response_tokens: int


@dataclass(kw_only=True, slots=True, frozen=True)
class LossOutput:
    """A micro-batch's share of the mini-batch's loss; shares add up to it exactly."""

    loss: Tensor
    """() float32."""
    clipped_low: Tensor
    """() float32, tokens held at 1 - clip_low; detached."""
    clipped_high: Tensor
    """() float32, tokens held at 1 + clip_high; detached."""


def sequence_sum(values: Tensor, inputs: LossInputs) -> Tensor:
    """(T,) -> (S,): sum over the tokens of each sequence."""
    zeros = values.new_zeros(inputs.lengths.shape[0])
    return zeros.index_add(0, inputs.row_index, values)


def mean_of_sequence_means(token_terms: Tensor, inputs: LossInputs, scale: LossScale) -> Tensor:
    """(1/N) sum_i w_i (1/L_i) sum_t x_it, N = scale.num_rows."""
    means = sequence_sum(token_terms, inputs) / inputs.lengths
    return (inputs.row_weights * means).sum() / scale.num_rows


def token_mean(token_terms: Tensor, inputs: LossInputs, scale: LossScale) -> Tensor:
    """(1/M) sum_i w_i sum_t x_it, M = scale.num_tokens."""
    return (inputs.row_weights[inputs.row_index] * token_terms).sum() / scale.num_tokens


def constant_length_mean(token_terms: Tensor, inputs: LossInputs, scale: LossScale) -> Tensor:
    """(1/N) sum_i w_i (1/C) sum_t x_it, C = the response limit."""
    weighted = inputs.row_weights[inputs.row_index] * token_terms
    return weighted.sum() / (scale.num_rows * scale.max_response_tokens)


def clipped_terms(ratio: Tensor, inputs: LossInputs, scale: LossScale) -> tuple[Tensor, ...]:
    """Per-token -min(r A, clip(r) A), mismatch and shaping applied, and the two clip counts."""
    advantages = inputs.advantages
    low, high = 1 - scale.clip_low, 1 + scale.clip_high
    terms = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if scale.dual_clip:
        floor = torch.where(advantages < 0, scale.dual_clip * advantages, terms)
        terms = torch.maximum(terms, floor)
    is_low = (ratio < low) & (advantages < 0)
    is_high = (ratio > high) & (advantages > 0)
    if inputs.is_shaped is not None:
        probability = inputs.token_logprobs.exp()
        shaped = probability / (probability + SHAPING_OFFSET) * advantages
        terms = torch.where(inputs.is_shaped, shaped, terms)
        is_low, is_high = is_low & ~inputs.is_shaped, is_high & ~inputs.is_shaped
    if inputs.mismatch_weights is not None:
        terms = terms * inputs.mismatch_weights
    return -terms, is_low.sum().float(), is_high.sum().float()


def token_ratio(inputs: LossInputs) -> Tensor:
    """(T,) r_t = exp(logp - logp_old)."""
    return torch.exp(inputs.token_logprobs - inputs.old_logprobs)


def sequence_ratio(inputs: LossInputs) -> Tensor:
    """(S,) s_i = exp((1/L_i) sum_t (logp - logp_old))."""
    difference = inputs.token_logprobs - inputs.old_logprobs
    return torch.exp(sequence_sum(difference, inputs) / inputs.lengths)


def k3_terms(token_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(T,) k3 = exp(d) - d - 1, d = logp_ref - logp: an unbiased, non-negative KL estimate."""
    difference = reference_logprobs - token_logprobs
    return torch.exp(difference) - difference - 1

"""Rewards and scores -> training rows with their advantages, by way of the fused ops.

    A_i   = (r_i - mean) / (std + eps) over all rows of the prompt
    A_i  += min(max(w (1 - eta_i), 0), clip A_i) for solved rows with A_i > 0,
            eta_i = exp(s_i - mean of s over the prompt's unseeded rows)

Source: arXiv 2510.06672; choices where it is silent are listed in the README.
"""

from collections.abc import Sequence

import numpy as np
import torch

from xrpo_fast.config import IclConfig, LossConfig, NoveltyConfig
from xrpo_fast.ops import XrpoAdvantages, xrpo_advantages
from xrpo_fast.types import Rollout, TrainingRow


def make_rows(rollouts: Sequence[Rollout], icl: IclConfig) -> list[TrainingRow]:
    """Rows with the prompt that each is trained under; advantages are filled in later."""
    return [_row(rollout, icl.train_prompt) for rollout in rollouts]


def _row(rollout: Rollout, train_prompt: str) -> TrainingRow:
    request = rollout.completion.request
    is_swapped = rollout.is_seeded and train_prompt != "seeded"
    return TrainingRow(
        group=request.group,
        prompt_ids=rollout.prompt.token_ids if is_swapped else request.prompt_ids,
        response_ids=rollout.completion.token_ids,
        advantage=0.0,
        sampler_logprobs=None if is_swapped else rollout.completion.logprobs,
        is_shaped=rollout.is_seeded and train_prompt == "original_shaped",
    )


def step_rewards(rollouts: Sequence[Rollout], loss: LossConfig, max_tokens: int) -> np.ndarray:
    """(S,) float64 rewards of the step, the soft overlong penalty included; NaN = unscored."""
    rewards = np.array([rollout.verdict.reward for rollout in rollouts], dtype=np.float64)
    buffer = loss.overlong_buffer_frac * max_tokens
    if buffer:
        lengths = np.array([rollout.num_tokens for rollout in rollouts])
        rewards -= np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0)
    return rewards


def shape_advantages(
    rows: Sequence[TrainingRow],
    rollouts: Sequence[Rollout],
    rewards: np.ndarray,
    *,
    loss: LossConfig,
    novelty: NoveltyConfig,
) -> XrpoAdvantages:
    """Advantages of rows that are ordered by group, as a host tensor per row (S,)."""
    scores = sequence_scores(rows, rollouts, novelty)
    counts = np.bincount([row.group for row in rows])
    return xrpo_advantages(
        torch.from_numpy(rewards),
        scores=torch.from_numpy(scores),
        cu_groups=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        correct=torch.tensor([rollout.verdict.solved for rollout in rollouts], dtype=torch.bool),
        exclude_from_novelty=torch.tensor([r.is_seeded for r in rollouts], dtype=torch.bool),
        novelty_weight=novelty.weight if novelty.enabled else 0.0,
        novelty_clip=novelty.clip,
        scale=loss.scale,
    )


def sequence_scores(
    rows: Sequence[TrainingRow], rollouts: Sequence[Rollout], novelty: NoveltyConfig
) -> np.ndarray:
    """(S,) float32 mean log-prob in nats: the trainer's old one where there is one, else the
    sampler's; NaN for empty rows, which the op leaves out."""
    logprobs = [
        row.old_logprobs
        if novelty.logprobs == "auto" and row.old_logprobs is not None and not rollout.is_seeded
        else rollout.completion.logprobs
        for row, rollout in zip(rows, rollouts, strict=True)
    ]
    ends = np.cumsum([len(piece) for piece in logprobs])
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate(logprobs), dtype=np.float64)])[ends]
    lengths = np.diff(ends, prepend=0)
    with np.errstate(invalid="ignore"):
        scores = (np.diff(sums, prepend=0.0) / lengths).astype(np.float32)
    if novelty.normalise == "length_residual":
        fitted = np.array([not r.is_seeded for r in rollouts]) & np.isfinite(scores)
        scores = length_residuals(scores, lengths, fitted)
    return scores


def length_residuals(scores: np.ndarray, lengths: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    """Residuals of a least-squares fit of the score on log length over the rows in `fitted`."""
    log_length = np.log(np.maximum(lengths, 1).astype(np.float64))
    if fitted.sum() < 2 or log_length[fitted].std() == 0:
        return scores
    slope, intercept = np.polyfit(log_length[fitted], scores[fitted].astype(np.float64), 1)
    return (scores - (slope * log_length + intercept)).astype(np.float32)


def fill_advantages(
    rows: Sequence[TrainingRow],
    rollouts: Sequence[Rollout],
    rewards: np.ndarray,
    advantages: np.ndarray,
    *,
    loss: LossConfig,
    icl: IclConfig,
) -> None:
    """Write advantages and row weights into the rows."""
    weights = row_weights([row.group for row in rows], advantages, loss.group_weight)
    for i, (row, rollout) in enumerate(zip(rows, rollouts, strict=True)):
        row.advantage = float(advantages[i])
        row.token_weight = float(weights[i])
        is_left_out = loss.truncated == "mask" and rollout.is_truncated
        if is_left_out or np.isnan(rewards[i]):
            row.token_weight = 0.0
        if rollout.is_seeded and not _trains(rollout, icl.train_prompt):
            row.advantage, row.is_trained = 0.0, False


def _trains(seeded: Rollout, train_prompt: str) -> bool:
    """Whether a seeded row has a gradient of its own; it is in the group's statistics anyway."""
    if train_prompt == "baseline_only":
        return False
    return train_prompt != "original_shaped" or seeded.verdict.solved


def row_weights(groups: Sequence[int], advantages: np.ndarray, group_weight: str) -> np.ndarray:
    """(S,) w: 1 | (S/P)/n_q | 1 for rows of groups with signal, else 0."""
    index = np.asarray(groups)
    if group_weight == "prompt":
        counts = np.bincount(index)
        num_groups = np.count_nonzero(counts)
        return len(index) / num_groups / counts[index]
    if group_weight == "effective":
        has_signal = np.bincount(index, weights=advantages != 0) > 0
        return has_signal[index].astype(np.float64)
    return np.ones(len(index))

"""Rewards and scores -> training rows with their advantages, by way of the fused ops.

    A_i   = (r_i - mean) / (std + eps) over all rows of the prompt
    A_i  += min(max(w (1 - eta_i), 0), clip A_i) for solved rows with A_i > 0,
            eta_i = exp(s_i - mean of s over the prompt's unseeded rows)

or, for the leaves of trees, `tree_advantages`.

Source: arXiv 2510.06672; choices where it is silent are listed in the README.
"""

from collections.abc import Sequence

import numpy as np
import torch

from xrpo_fast.config import IclConfig, LossConfig, NoveltyConfig, TreeConfig
from xrpo_fast.ops import XrpoAdvantages, xrpo_advantages
from xrpo_fast.types import Rollout, TrainingRow

WHITENING_EPS = 1e-6
"""Added to the standard deviation, as in the group advantage."""


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
    tree: TreeConfig,
) -> XrpoAdvantages:
    """Advantages of rows that are ordered by group, as a host tensor per row (S,)."""
    scores = sequence_scores(rows, rollouts, novelty)
    counts = np.bincount([row.group for row in rows])
    shaped = xrpo_advantages(
        torch.from_numpy(rewards),
        scores=torch.from_numpy(scores),
        cu_groups=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        correct=torch.from_numpy(np.array([r.verdict.solved for r in rollouts])),
        exclude_from_novelty=torch.from_numpy(np.array([r.is_seeded for r in rollouts])),
        novelty_weight=novelty.weight if novelty.enabled else 0.0,
        novelty_clip=novelty.clip,
        scale=loss.scale,
    )
    if tree.enabled:
        counted = [0 if is_left_out(r, loss) else r.num_tokens for r in rollouts]
        ancestors = [rollout.ancestors for rollout in rollouts]
        own = tree_advantages(rewards, [row.group for row in rows], ancestors, counted)
        shaped = shaped._replace(advantages=torch.from_numpy(own), base=torch.from_numpy(own))
    return shaped


def tree_advantages(
    rewards: np.ndarray,
    groups: Sequence[int],
    ancestors: Sequence[Sequence[int]],
    num_tokens: Sequence[int],
) -> np.ndarray:
    """Mean lead of a leaf over the subtrees it is in, whitened over the step's tokens.

        A_i = mean_j (R_i - mean of R over the leaves below j), j = root, and each deeper ancestor
              with more than one leaf below it
        A_i = (A_i - mean) / (std + eps), mean and std (ddof 0) over all tokens

    Args:
        rewards:    (S,) float64; NaN = unscored: in no mean, advantage 0.
        groups:     (S,) the tree of each leaf.
        ancestors:  segments in front of each leaf's last one, root first, by number in the tree.
        num_tokens: (S,) tokens of each leaf that the loss counts.
    Returns:
        (S,) float64. Exactly 0 for leaves without tokens, and in trees whose scored rewards are all
        equal: DAPO's filter drops them, so their tokens do not enter the whitening either.
    Source: TreePO, arXiv:2508.17445; the filter from DAPO, arXiv:2503.14476.
    """
    group = np.asarray(groups)
    depths = np.array([len(path) for path in ancestors])
    leaf = np.repeat(np.arange(len(rewards)), depths)
    number = np.concatenate([np.asarray(path, dtype=np.int64) for path in ancestors])
    _, node = np.unique(group[leaf] * (number.max() + 1) + number, return_inverse=True)
    is_scored = ~np.isnan(rewards)
    known = np.where(is_scored, rewards, 0.0)
    sizes = np.bincount(node, weights=is_scored[leaf])
    means = np.bincount(node, weights=known[leaf]) / np.maximum(sizes, 1)
    is_root = np.arange(len(leaf)) == (np.cumsum(depths) - depths)[leaf]
    counts = is_root | (sizes[node] > 1)
    leads = np.bincount(leaf, weights=counts * (known[leaf] - means[node]))
    leads /= np.bincount(leaf, weights=counts)

    low, high = np.full((2, group.max() + 1), [[np.inf], [-np.inf]])
    np.minimum.at(low, group[is_scored], rewards[is_scored])
    np.maximum.at(high, group[is_scored], rewards[is_scored])
    tokens = np.asarray(num_tokens) * (is_scored & (low < high)[group])
    total = max(tokens.sum(), 1)
    mean = (tokens * leads).sum() / total
    std = np.sqrt((tokens * (leads - mean) ** 2).sum() / total)
    return np.where(tokens > 0, (leads - mean) / (std + WHITENING_EPS), 0.0)


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
    lengths = np.array([len(piece) for piece in logprobs])
    row = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(row, weights=np.concatenate(logprobs), minlength=len(lengths))
    with np.errstate(invalid="ignore"):
        scores = (sums / lengths).astype(np.float32)
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
    is_counted = ~(np.isnan(rewards) | np.array([is_left_out(r, loss) for r in rollouts]))
    groups = [row.group for row in rows]
    weights = row_weights(groups, advantages, is_counted, loss.group_weight)
    columns = zip(rows, rollouts, advantages.tolist(), weights.tolist(), strict=True)
    for row, rollout, advantage, weight in columns:
        row.advantage, row.token_weight = advantage, weight
        if rollout.is_seeded and not _trains(rollout, icl.train_prompt):
            row.advantage, row.is_trained = 0.0, False


def is_left_out(rollout: Rollout, loss: LossConfig) -> bool:
    """Whether a row is in neither numerator nor denominator of the loss."""
    return loss.truncated == "mask" and rollout.is_truncated


def _trains(seeded: Rollout, train_prompt: str) -> bool:
    """Whether a seeded row has a gradient of its own; it is in the group's statistics anyway."""
    if train_prompt == "baseline_only":
        return False
    return train_prompt != "original_shaped" or seeded.verdict.solved


def row_weights(
    groups: Sequence[int], advantages: np.ndarray, is_counted: np.ndarray, group_weight: str
) -> np.ndarray:
    """(S,) w: 1 | (S/P)/n_q | 1 for rows of groups with signal; S rows, P groups and n_q rows of a
    group that count. 0 for rows that do not count: unscored, or left out as truncated."""
    index = np.asarray(groups)
    weights = np.ones(len(index))
    if group_weight == "prompt":
        counts = np.bincount(index, weights=is_counted)
        mean_count = is_counted.sum() / max(np.count_nonzero(counts), 1)
        weights = mean_count / np.maximum(counts, 1)[index]
    elif group_weight == "effective":
        weights = (np.bincount(index, weights=advantages != 0) > 0)[index]
    return np.where(is_counted, weights, 0.0)

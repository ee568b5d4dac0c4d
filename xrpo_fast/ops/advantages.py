"""Group advantages and XRPO's novelty bonus over ragged groups.

Legend: P prompts (groups), S sequences (rollouts), T packed tokens, L padded length.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from xrpo_fast.ops import checks
from xrpo_fast.ops.advantages_op import launch
from xrpo_fast.ops.backends import resolve
from xrpo_fast.ops.grouping import grouping, restored, scored_rows
from xrpo_fast.ops.sequences import check_offsets

SCALES = ("group", "batch", "none")


class GroupAdvantages(NamedTuple):
    """What `group_advantages` returns: all (S,), in the order of `rewards`, without gradient."""

    advantages: Tensor
    """Unitless; exactly 0 where all rewards of the group are equal, or the reward is NaN."""
    mean: Tensor
    """Mean reward of the row's group; NaN where no reward of it is scored."""
    std: Tensor
    """What divides: of the group, or of all rows for scale "batch"."""
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """int64, scored rows of the group."""


class XrpoAdvantages(NamedTuple):
    """What `xrpo_advantages` returns: all (S,), in the order of `rewards`, without gradient."""

    advantages: Tensor
    """base + bonus."""
    base: Tensor
    """The group advantage alone."""
    bonus: Tensor
    """>= 0; for correct rows of positive advantage that are rarer than their group."""
    eta: Tensor
    """exp(score - mean score of the group); 1 for rows that take no part in novelty."""
    scores: Tensor
    """Mean log-prob per token, nats; 0 for a row of no tokens."""
    mean: Tensor
    """Mean reward of the row's group."""
    std: Tensor
    """What divides: of the group, or of all rows for scale "batch"."""


def group_advantages(
    rewards: Tensor,
    *,
    cu_groups: Tensor | None = None,
    group_ids: Tensor | None = None,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    backend: str = "auto",
    validate: bool = False,
) -> GroupAdvantages:
    """Reward minus the mean of its group, over the group's standard deviation.

        A = (r - mean) / (std + eps); r - mean for scale "none"

    Args:
        rewards:   (S,), any real dtype; NaN = unscored: out of the statistics, advantage 0.
        cu_groups: (P+1,) int32 or int64: group p holds rows cu_groups[p] .. cu_groups[p+1]-1.
        group_ids: (S,) int32 or int64, any integers in any order; instead of cu_groups.
        scale:     "group", "batch" (std of all scored rows) or "none".
        ddof:      0 or 1: the variance divides by count - ddof.
        eps:       >= 0, added to std.
    Returns:
        GroupAdvantages: float32, or float64 for float64 rewards.
    Raises:
        ValueError, TypeError: wrong dtype, shape, device or value; both or neither of cu_groups and
        group_ids; cu_groups that does not start at 0, decreases, or does not end at S.
    Source: GRPO, arXiv:2402.03300; "batch" and "none" as in TRL's scale_rewards.
    """
    rewards, _ = _checked_rewards(rewards, 1.0, scale, ddof, eps)
    cu_groups, order = grouping(rewards, cu_groups, group_ids)
    values = rewards if order is None else rewards[order]
    result = launch(
        values, None, None, None, None, cu_groups, None, 1.0, None, 0.0, 0.0, scale, ddof, eps,
        resolve(backend, rewards, "rewards"), validate,
    )  # fmt: skip
    rows = [result[0], result[5], result[6], scored_rows(values, cu_groups)]
    return GroupAdvantages(*restored(rows, order))


def xrpo_advantages(
    rewards: Tensor,
    *,
    scores: Tensor | None = None,
    token_logprobs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_groups: Tensor | None = None,
    group_ids: Tensor | None = None,
    mask: Tensor | None = None,
    correct: Tensor | None = None,
    full_reward: float = 1.0,
    exclude_from_novelty: Tensor | None = None,
    novelty_weight: float = 2.5,
    novelty_clip: float = 0.5,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    backend: str = "auto",
    validate: bool = False,
) -> XrpoAdvantages:
    """XRPO's advantage: the group advantage, raised for correct rollouts that are rare.

        base  = (r - mean) / (std + eps)
        eta   = exp(s - mean of s over the group)            s: mean log-prob per token
        bonus = min(max(novelty_weight (1 - eta), 0), novelty_clip base) where correct and base > 0
        A     = base + bonus

    Args:
        rewards:        (S,), any real dtype; NaN = unscored: out of all statistics, advantage 0.
        scores:         (S,) float, s itself; or
        token_logprobs: (T,) float with cu_seqlens, or (S, L) with mask. One of the three, unless
                        novelty_weight is 0.
        cu_seqlens:     (S+1,) int32 or int64: sequence s holds tokens from cu_seqlens[s] up to
                        cu_seqlens[s+1].
        cu_groups:      (P+1,) int32 or int64: group p holds rows cu_groups[p] .. cu_groups[p+1]-1.
        group_ids:      (S,) int32 or int64, any integers in any order; instead of cu_groups.
        mask:           (S, L) bool, True = a token of the response.
        correct:        (S,) bool; default rewards >= full_reward.
        exclude_from_novelty: (S,) bool: seeded rollouts; no bonus, out of the mean score.
        novelty_weight, novelty_clip: >= 0.
        scale, ddof, eps: as in group_advantages.
    Returns:
        XrpoAdvantages: float32, or float64 for float64 rewards.
    Raises:
        ValueError, TypeError: as group_advantages, and for scores given twice or not at all.
    Notes:
        A row of no tokens, or whose score is not finite, takes no part in novelty: eta 1, bonus 0.
    Source: XRPO, arXiv:2510.06672.
    """
    scores = _detached("scores", scores)
    token_logprobs = _detached("token_logprobs", token_logprobs)
    rewards, full_reward = _checked_rewards(rewards, full_reward, scale, ddof, eps)
    for name, value in (("novelty_weight", novelty_weight), ("novelty_clip", novelty_clip)):
        _check_not_negative(name, value)
    for name, flags in (("correct", correct), ("exclude_from_novelty", exclude_from_novelty)):
        if flags is not None:
            _check_flags(name, flags, rewards)
    _check_scores(rewards, scores, token_logprobs, cu_seqlens, mask, novelty_weight)
    backend = resolve(backend, rewards, "rewards")
    cu_groups, order = grouping(rewards, cu_groups, group_ids)
    exclude = exclude_from_novelty
    if order is not None:
        if cu_seqlens is not None and token_logprobs is not None:
            scores, lengths = torch.ops.xrpo_fast.sequence_logprobs(
                token_logprobs, cu_seqlens, "mean", backend, validate
            )
            exclude = lengths == 0 if exclude is None else exclude | (lengths == 0)
            token_logprobs = cu_seqlens = None
        rewards = rewards[order]
        scores, token_logprobs, mask, correct, exclude = (
            None if x is None else x[order]
            for x in (scores, token_logprobs, mask, correct, exclude)
        )
    result = launch(
        rewards, scores, token_logprobs, cu_seqlens, mask, cu_groups, correct, full_reward, exclude,
        novelty_weight, novelty_clip, scale, ddof, eps, backend, validate,
    )  # fmt: skip
    return XrpoAdvantages(*restored(result, order))


def _detached(argument: str, tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    checks.tensor(argument, tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def _check_not_negative(argument: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{argument}: expected a finite number >= 0, got {value}")


def _checked_rewards(
    rewards: Tensor, full_reward: float, scale: str, ddof: int, eps: float
) -> tuple[Tensor, float]:
    """Rewards as float32 or float64, and full_reward as the dtype of rewards has it."""
    checks.tensor("rewards", rewards)
    if rewards.ndim != 1:
        raise ValueError(f"rewards: expected shape (S,), got {tuple(rewards.shape)}")
    if rewards.dtype.is_complex:
        raise TypeError(f"rewards: expected a real dtype, got {rewards.dtype}")
    checks.choice("scale", scale, SCALES)
    if ddof not in (0, 1):
        raise ValueError(f"ddof: expected 0 or 1, got {ddof}")
    _check_not_negative("eps", eps)
    if rewards.requires_grad:
        rewards = rewards.detach()
    if rewards.dtype in (torch.float32, torch.float64):
        return rewards, full_reward
    if rewards.dtype in (torch.bfloat16, torch.float16):
        full_reward = torch.tensor(full_reward, dtype=rewards.dtype).item()
    return rewards.float(), full_reward


def _check_flags(argument: str, flags: Tensor, rewards: Tensor) -> None:
    checks.dtype(argument, flags, (torch.bool,))
    checks.shape(argument, flags, rewards.shape, "(S,)")
    checks.same_device(argument, flags, "rewards", rewards)


def _check_scores(
    rewards: Tensor,
    scores: Tensor | None,
    token_logprobs: Tensor | None,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    novelty_weight: float,
) -> None:
    """Exactly one source of scores (or none with novelty_weight 0), with the right shapes."""
    num_seqs = rewards.shape[0]
    if scores is not None and token_logprobs is not None:
        raise ValueError("scores: expected None beside token_logprobs, got both")
    if token_logprobs is None and (cu_seqlens is not None or mask is not None):
        extra = "cu_seqlens" if cu_seqlens is not None else "mask"
        raise ValueError(f"{extra}: expected None without token_logprobs, got a tensor")
    if scores is not None:
        checks.dtype("scores", scores, checks.FLOATS)
        checks.shape("scores", scores, (num_seqs,), "(S,)")
        checks.same_device("scores", scores, "rewards", rewards)
    elif token_logprobs is not None:
        checks.dtype("token_logprobs", token_logprobs, checks.FLOATS)
        checks.same_device("token_logprobs", token_logprobs, "rewards", rewards)
        if (cu_seqlens is None) == (mask is None):
            got = "neither" if mask is None else "both"
            raise ValueError(f"cu_seqlens: expected it for (T,) or mask for (S, L), got {got}")
        if cu_seqlens is not None:
            if token_logprobs.ndim != 1:
                raise ValueError(
                    f"token_logprobs: expected shape (T,) with cu_seqlens, got "
                    f"{tuple(token_logprobs.shape)}"
                )
            check_offsets("cu_seqlens", cu_seqlens, "rewards", rewards)
            checks.shape("cu_seqlens", cu_seqlens, (num_seqs + 1,), "(S + 1,)")
        if mask is not None:
            expected = (num_seqs, *token_logprobs.shape[1:2])
            checks.shape("token_logprobs", token_logprobs, expected, "(S, L)")
            checks.dtype("mask", mask, (torch.bool,))
            checks.shape("mask", mask, token_logprobs.shape, "(S, L)")
            checks.same_device("mask", mask, "rewards", rewards)
    elif novelty_weight != 0:
        raise ValueError(
            "scores: expected scores, or token_logprobs with cu_seqlens or mask, got none; "
            "pass novelty_weight=0 for the plain advantage"
        )

"""Group advantages and XRPO's novelty bonus over ragged groups.

Legend: P prompts (groups), S sequences (rollouts), T packed tokens, L padded length.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xrpo_fast.ops import checks
from xrpo_fast.ops.backends import LIBRARY, launcher, resolve
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
    count: Tensor
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
    cu_groups, order = _grouping(rewards, cu_groups, group_ids)
    values = rewards if order is None else rewards[order]
    result = _launch(
        values, None, None, None, None, cu_groups, None, 1.0, None, 0.0, 0.0, scale, ddof, eps,
        resolve(backend, rewards, "rewards"), validate,
    )  # fmt: skip
    rows = [result[0], result[5], result[6], _scored_rows(values, cu_groups)]
    return GroupAdvantages(*_restored(rows, order))


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
        bonus = min(max(novelty_weight (1 - eta), 0), novelty_clip base)   where correct and base > 0
        A     = base + bonus

    Args:
        rewards:        (S,), any real dtype; NaN = unscored: out of all statistics, advantage 0.
        scores:         (S,) float, s itself; or
        token_logprobs: (T,) float with cu_seqlens, or (S, L) with mask. One of the three, unless
                        novelty_weight is 0.
        cu_seqlens:     (S+1,) int32 or int64: sequence s holds tokens cu_seqlens[s] .. cu_seqlens[s+1]-1.
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
    rewards, full_reward = _checked_rewards(rewards, full_reward, scale, ddof, eps)
    for name, value in (("novelty_weight", novelty_weight), ("novelty_clip", novelty_clip)):
        _check_not_negative(name, value)
    for name, flags in (("correct", correct), ("exclude_from_novelty", exclude_from_novelty)):
        if flags is not None:
            _check_flags(name, flags, rewards)
    _check_scores(rewards, scores, token_logprobs, cu_seqlens, mask, novelty_weight)
    backend = resolve(backend, rewards, "rewards")
    cu_groups, order = _grouping(rewards, cu_groups, group_ids)
    exclude = exclude_from_novelty
    if order is not None:
        if cu_seqlens is not None:
            scores, lengths = torch.ops.xrpo_fast.sequence_logprobs(
                token_logprobs, cu_seqlens, "mean", backend, validate
            )
            exclude = lengths == 0 if exclude is None else exclude | (lengths == 0)
            token_logprobs = cu_seqlens = None
        rewards, scores, token_logprobs, mask, correct, exclude = (
            None if x is None else x[order]
            for x in (rewards, scores, token_logprobs, mask, correct, exclude)
        )
    result = _launch(
        rewards, scores, token_logprobs, cu_seqlens, mask, cu_groups, correct, full_reward, exclude,
        novelty_weight, novelty_clip, scale, ddof, eps, backend, validate,
    )  # fmt: skip
    return XrpoAdvantages(*_restored(result, order))


def _check_not_negative(argument: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{argument}: expected a finite number >= 0, got {value}")


def _checked_rewards(
    rewards: Tensor, full_reward: float, scale: str, ddof: int, eps: float
) -> tuple[Tensor, float]:
    """Rewards as float32 or float64, and full_reward as the dtype of rewards has it."""
    if rewards.ndim != 1:
        raise ValueError(f"rewards: expected shape (S,), got {tuple(rewards.shape)}")
    if rewards.dtype.is_complex:
        raise TypeError(f"rewards: expected a real dtype, got {rewards.dtype}")
    checks.choice("scale", scale, SCALES)
    if ddof not in (0, 1):
        raise ValueError(f"ddof: expected 0 or 1, got {ddof}")
    _check_not_negative("eps", eps)
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


def _grouping(
    rewards: Tensor, cu_groups: Tensor | None, group_ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """cu_groups, and the order that makes groups contiguous (None: they are).

    From ids, cu_groups has S + 1 entries and ends in empty groups: their number needs no sync.
    """
    if (cu_groups is None) == (group_ids is None):
        got = "neither" if cu_groups is None else "both"
        raise ValueError(f"cu_groups: expected exactly one of cu_groups and group_ids, got {got}")
    num_seqs = rewards.shape[0]
    if cu_groups is not None:
        check_offsets("cu_groups", cu_groups, "rewards", rewards)
        return cu_groups, None
    assert group_ids is not None
    checks.dtype("group_ids", group_ids, checks.INDICES)
    checks.shape("group_ids", group_ids, (num_seqs,), "(S,)")
    checks.same_device("group_ids", group_ids, "rewards", rewards)
    ids, order = torch.sort(group_ids, stable=True)
    cu_groups = torch.full((num_seqs + 1,), num_seqs, dtype=torch.int64, device=ids.device)
    if num_seqs == 0:
        return cu_groups, order
    is_start = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=is_start[1:])
    group = is_start.cumsum(0) - 1
    rows = torch.arange(num_seqs, device=ids.device)
    cu_groups.scatter_reduce_(0, group, rows, "amin")
    return cu_groups, order


def _scored_rows(rewards: Tensor, cu_groups: Tensor) -> Tensor:
    """(S,) int64: number of scored rows in each row's group."""
    offsets = cu_groups.long()
    before = rewards.new_zeros(rewards.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(~rewards.isnan(), 0, out=before[1:])
    count = before[offsets].diff()
    return count.repeat_interleave(offsets.diff(), output_size=rewards.shape[0])


def _restored(rows: Sequence[Tensor], order: Tensor | None) -> Sequence[Tensor]:
    """Rows sorted by `order`, back in the caller's order."""
    if order is None:
        return rows
    inverse = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.shape[0], device=order.device)
    )
    return [x[inverse] for x in rows]


def _launch(rewards: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The op, called past the dispatcher where nobody watches: that is half of the time of a small call."""
    if type(rewards) is Tensor and not torch.compiler.is_compiling():
        with torch.no_grad():
            return _forward(rewards, *arguments)
    return torch.ops.xrpo_fast.xrpo_advantages(rewards, *arguments)


def _forward(
    rewards: Tensor,
    scores: Tensor | None,
    token_logprobs: Tensor | None,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    cu_groups: Tensor,
    correct: Tensor | None,
    full_reward: float,
    exclude: Tensor | None,
    novelty_weight: float,
    novelty_clip: float,
    scale: str,
    ddof: int,
    eps: float,
    backend: str,
    validate: bool,
) -> tuple[Tensor, ...]:
    if validate or rewards.device.type == "cpu":
        checks.cumulative("cu_groups", cu_groups, rewards.shape[0], "rows")
        if cu_seqlens is not None:
            assert token_logprobs is not None
            checks.cumulative("cu_seqlens", cu_seqlens, token_logprobs.shape[0], "tokens")
    launch = launcher(backend, "advantages", "xrpo_advantages_fwd")
    tensors = (rewards, scores, token_logprobs, cu_seqlens, token_mask, cu_groups, correct)
    rewards, scores, token_logprobs, cu_seqlens, token_mask, cu_groups, correct = (
        None if x is None else x.contiguous() for x in tensors
    )
    return launch(
        rewards, scores, token_logprobs, cu_seqlens, token_mask, cu_groups, correct, full_reward,
        None if exclude is None else exclude.contiguous(),
        novelty_weight, novelty_clip, scale, ddof, eps,
    )  # fmt: skip


def _forward_fake(rewards: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(rewards.new_empty(rewards.shape) for _ in range(7))


LIBRARY.define(
    "xrpo_advantages(Tensor rewards, Tensor? scores, Tensor? token_logprobs, Tensor? cu_seqlens, "
    "Tensor? token_mask, Tensor cu_groups, Tensor? correct, float full_reward, Tensor? exclude, "
    "float novelty_weight, float novelty_clip, str scale, int ddof, float eps, str backend, "
    "bool validate) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl("xrpo_advantages", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("xrpo_fast::xrpo_advantages", _forward_fake, lib=LIBRARY)

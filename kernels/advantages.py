"""Sequence scores, group statistics, novelty and advantage: one launch for ragged groups.

Legend: P prompts (groups), S sequences (rows), T packed tokens, L padded length.

    s     = mean log-prob of the row's tokens                                   (score)
    base  = (r - mean) / (std + eps)          statistics over the scored rewards of the group
    eta   = exp(s - mean of s over the rows of the group that take part in novelty)
    bonus = min(max(novelty_weight (1 - eta), 0), novelty_clip base)  where correct and base > 0
    advantage = base + bonus

A program owns a group and takes its rows in blocks: scores, then the first scored reward, then sums
of differences from it, then squares about their mean, then the results. Later passes find the rows
in the cache. All sums are float64; equal rewards give differences, and so advantages, of exactly 0.
scale="batch" costs a second launch: moments (count, mean, squares) of blocks of rows, which each
program merges. No atomics: results do not depend on neighbours.

Bytes: 4 T + 24 S read, 28 S written (float32).
"""

# Kernels are launched, not called, and their constants arrive as plain numbers.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from xrpo_fast.kernels.tuning import (
    BATCH_BLOCK,
    ROWS_PER_BLOCK,
    ROWS_PER_TILE,
    STATS_OPTIONS,
    TOKEN_OPTIONS,
    TOKENS_PER_TILE,
    device_of,
)

NONE, SCORES, PACKED, PADDED = (tl.constexpr(i) for i in range(4))
"""Where a row's score comes from: nowhere, given, or tokens, by cu_seqlens or by a mask."""

_SCALARS = ["padded_length", "num_partials", "full_reward", "novelty_weight", "novelty_clip", "eps"]
_SCALARS += ["ddof", "divides", "divides_by_batch", "has_correct", "has_exclude", "is_mean"]
_SCALARS += ["num_rows"]
_POINTERS = ["rewards_ptr", "given_ptr", "token_logprobs_ptr", "cu_seqlens_ptr", "token_mask_ptr"]
_POINTERS += ["cu_groups_ptr", "correct_ptr", "exclude_ptr", "partials_ptr", "advantages_ptr"]
_POINTERS += [
    "base_ptr",
    "bonus_ptr",
    "eta_ptr",
    "scores_ptr",
    "mean_ptr",
    "std_ptr",
    "lengths_ptr",
]

# The parameter lists of the kernels are several to a line.
# fmt: off


@triton.jit
def _token_sums(
    rows, row_mask, token_logprobs_ptr, cu_seqlens_ptr, token_mask_ptr, padded_length,
    IS_PACKED: tl.constexpr, ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """(sum of log-probs float64, number of tokens int64) of each of ROWS sequences."""
    if IS_PACKED:
        begin = tl.load(cu_seqlens_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        length = tl.load(cu_seqlens_ptr + rows + 1, mask=row_mask, other=0).to(tl.int64) - begin
    else:
        begin = rows.to(tl.int64) * padded_length
        length = tl.where(row_mask, padded_length, 0).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK_T], tl.float64)
    count = tl.zeros([ROWS, BLOCK_T], tl.int32)
    for start_t in range(0, tl.max(length, 0), BLOCK_T):
        offs_t = start_t + tl.arange(0, BLOCK_T)
        offs = begin[:, None] + offs_t[None, :]
        keep = offs_t[None, :] < length[:, None]
        if not IS_PACKED:
            keep = tl.load(token_mask_ptr + offs, mask=keep, other=0) != 0
            count += keep.to(tl.int32)
        total += tl.load(token_logprobs_ptr + offs, mask=keep, other=0.0).to(tl.float64)
    if not IS_PACKED:
        length = tl.sum(count, 1).to(tl.int64)
    return tl.sum(total, 1), length


@triton.jit
def _score_rows(
    start, stop, given_ptr, scores_ptr, token_logprobs_ptr, cu_seqlens_ptr, token_mask_ptr,
    padded_length,
    IS_PACKED: tl.constexpr, ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """Mean log-probs of a group's rows into scores (0 without tokens) and given (then NaN)."""
    for start_s in range(start, stop, ROWS):
        rows = start_s + tl.arange(0, ROWS)
        row_mask = rows < stop
        total, length = _token_sums(
            rows, row_mask, token_logprobs_ptr, cu_seqlens_ptr, token_mask_ptr, padded_length,
            IS_PACKED, ROWS, BLOCK_T,
        )
        score = total / tl.maximum(length, 1).to(tl.float64)
        tl.store(scores_ptr + rows, score.to(scores_ptr.dtype.element_ty), mask=row_mask)
        tl.store(given_ptr + rows, tl.where(length > 0, score, float("nan")), mask=row_mask)
    # The group's statistics read `given` with other threads than have written it.
    tl.debug_barrier()


@triton.jit
def _first_scored(rewards_ptr, start, stop, BLOCK_S: tl.constexpr):
    """float64 reward of the first row that has one, NaN if none has."""
    first = tl.full([BLOCK_S], 2147483647, tl.int32)
    for start_s in range(start, stop, BLOCK_S):
        rows = start_s + tl.arange(0, BLOCK_S)
        reward = tl.load(rewards_ptr + rows, mask=rows < stop, other=float("nan"))
        first = tl.minimum(first, tl.where(reward == reward, rows, 2147483647))
    row = tl.min(first, 0)
    value = tl.load(rewards_ptr + row, mask=row < stop, other=float("nan"))
    return value.to(tl.float64)


@triton.jit
def _merge_partials(partials_ptr, num_partials, ddof, BLOCK_S: tl.constexpr):
    """Standard deviation (float64) of all rows from (count, mean, squares) of blocks of them."""
    first_mean = tl.load(partials_ptr + 1)
    count = tl.zeros([BLOCK_S], tl.float64)
    shift = tl.zeros([BLOCK_S], tl.float64)
    for start_b in range(0, num_partials, BLOCK_S):
        blocks = start_b + tl.arange(0, BLOCK_S)
        block_count = tl.load(partials_ptr + blocks * 3, mask=blocks < num_partials, other=0.0)
        mean = tl.load(partials_ptr + blocks * 3 + 1, mask=blocks < num_partials, other=0.0)
        count += block_count
        shift += block_count * tl.where(block_count > 0, mean - first_mean, 0.0)
    num_scored = tl.sum(count, 0)
    mean_shift = tl.sum(shift, 0) / tl.maximum(num_scored, 1.0)
    squares = tl.zeros([BLOCK_S], tl.float64)
    for start_b in range(0, num_partials, BLOCK_S):
        blocks = start_b + tl.arange(0, BLOCK_S)
        block_count = tl.load(partials_ptr + blocks * 3, mask=blocks < num_partials, other=0.0)
        mean = tl.load(partials_ptr + blocks * 3 + 1, mask=blocks < num_partials, other=0.0)
        within = tl.load(partials_ptr + blocks * 3 + 2, mask=blocks < num_partials, other=0.0)
        between = tl.where(block_count > 0, mean - first_mean - mean_shift, 0.0)
        squares += within + block_count * between * between
    return _deviation(tl.sum(squares, 0), num_scored, ddof)


@triton.jit
def _deviation(squares, count, ddof):
    """sqrt(squares / (count - ddof)), 0 where that is undefined."""
    return tl.where(count > ddof, tl.sqrt(squares / tl.maximum(count - ddof, 1.0)), 0.0)


@triton.jit
def _moments(rewards_ptr, start, stop, BLOCK_S: tl.constexpr):
    """(first scored reward, count, mean minus that, squares about the mean) of rows, float64."""
    first = _first_scored(rewards_ptr, start, stop, BLOCK_S)
    count = tl.zeros([BLOCK_S], tl.float64)
    total = tl.zeros([BLOCK_S], tl.float64)
    for start_s in range(start, stop, BLOCK_S):
        rows = start_s + tl.arange(0, BLOCK_S)
        reward = tl.load(rewards_ptr + rows, mask=rows < stop, other=float("nan")).to(tl.float64)
        count += tl.where(reward == reward, 1.0, 0.0)
        total += tl.where(reward == reward, reward - first, 0.0)
    num_scored = tl.sum(count, 0)
    mean_diff = tl.sum(total, 0) / tl.maximum(num_scored, 1.0)
    squares = tl.zeros([BLOCK_S], tl.float64)
    for start_s in range(start, stop, BLOCK_S):
        rows = start_s + tl.arange(0, BLOCK_S)
        reward = tl.load(rewards_ptr + rows, mask=rows < stop, other=float("nan")).to(tl.float64)
        centered = tl.where(reward == reward, reward - first - mean_diff, 0.0)
        squares += centered * centered
    return first, num_scored, mean_diff, tl.sum(squares, 0)


@triton.jit
def _takes_part(rows, row_mask, reward, given_ptr, exclude_ptr, has_exclude):
    """(score float64, whether the row takes part in novelty)."""
    score = tl.load(given_ptr + rows, mask=row_mask, other=float("nan")).to(tl.float64)
    part = (tl.abs(score) < float("inf")) & (reward == reward)
    if has_exclude:
        part = part & (tl.load(exclude_ptr + rows, mask=row_mask, other=1) == 0)
    return score, part


@triton.jit
def _mean_score(
    rewards_ptr, given_ptr, exclude_ptr, has_exclude, start, stop, BLOCK_S: tl.constexpr
):
    """Mean score (float64) of the group's rows that take part."""
    count = tl.zeros([BLOCK_S], tl.float64)
    total = tl.zeros([BLOCK_S], tl.float64)
    for start_s in range(start, stop, BLOCK_S):
        rows = start_s + tl.arange(0, BLOCK_S)
        reward = tl.load(rewards_ptr + rows, mask=rows < stop, other=float("nan"))
        score, part = _takes_part(rows, rows < stop, reward, given_ptr, exclude_ptr, has_exclude)
        count += tl.where(part, 1.0, 0.0)
        total += tl.where(part, score, 0.0)
    return tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def _batch_moments_kernel(rewards_ptr, partials_ptr, num_rows, BLOCK_S: tl.constexpr):
    """A program per BLOCK_S rows: (count, mean, squares about it) into partials (blocks, 3)."""
    pid = tl.program_id(0)
    start = pid * BLOCK_S
    stop = tl.minimum(start + BLOCK_S, num_rows)
    first, count, mean_diff, squares = _moments(rewards_ptr, start, stop, BLOCK_S)
    tl.store(partials_ptr + pid * 3, count)
    tl.store(partials_ptr + pid * 3 + 1, first + mean_diff)
    tl.store(partials_ptr + pid * 3 + 2, squares)


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def _xrpo_advantages_kernel(
    rewards_ptr, given_ptr, token_logprobs_ptr, cu_seqlens_ptr, token_mask_ptr, cu_groups_ptr,
    correct_ptr, exclude_ptr, partials_ptr, advantages_ptr, base_ptr, bonus_ptr, eta_ptr,
    scores_ptr, mean_ptr, std_ptr, padded_length, num_partials, full_reward, novelty_weight,
    novelty_clip, eps, ddof, divides, divides_by_batch, has_correct, has_exclude,
    SOURCE: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """A program per group."""
    group = tl.program_id(0)
    start = tl.load(cu_groups_ptr + group).to(tl.int32)
    stop = tl.load(cu_groups_ptr + group + 1).to(tl.int32)
    if SOURCE >= PACKED:
        _score_rows(
            start, stop, given_ptr, scores_ptr, token_logprobs_ptr, cu_seqlens_ptr, token_mask_ptr,
            padded_length, SOURCE == PACKED, ROWS, BLOCK_T,
        )
    first, count, mean_diff, squares = _moments(rewards_ptr, start, stop, BLOCK_S)
    std = _deviation(squares, count, ddof)
    if divides_by_batch:
        std = _merge_partials(partials_ptr, num_partials, ddof, BLOCK_S)
    std = tl.where(count > 0, std, float("nan"))
    divisor = tl.where(divides != 0, std + eps, 1.0)
    mean_score = first
    if SOURCE != NONE:
        mean_score = _mean_score(
            rewards_ptr, given_ptr, exclude_ptr, has_exclude, start, stop, BLOCK_S
        )
    dtype = advantages_ptr.dtype.element_ty
    for start_s in range(start, stop, BLOCK_S):
        rows = start_s + tl.arange(0, BLOCK_S)
        row_mask = rows < stop
        stored = tl.load(rewards_ptr + rows, mask=row_mask, other=float("nan"))
        reward = stored.to(tl.float64)
        centered = reward - first - mean_diff
        # 0 / 0 where eps is 0 and all rewards are equal: 0 as well.
        is_zero = (centered == 0.0) | (reward != reward)
        base = tl.where(is_zero, 0.0, centered / divisor)
        score = tl.zeros([BLOCK_S], tl.float64)
        eta = score + 1.0
        bonus = score
        if SOURCE != NONE:
            score, part = _takes_part(rows, row_mask, reward, given_ptr, exclude_ptr, has_exclude)
            eta = tl.where(part, tl.exp(score - mean_score), 1.0)
            correct = stored >= full_reward
            if has_correct:
                correct = tl.load(correct_ptr + rows, mask=row_mask, other=0) != 0
            bonus = tl.minimum(tl.maximum(novelty_weight * (1.0 - eta), 0.0), novelty_clip * base)
            bonus = tl.where(correct & part & (base > 0.0), bonus, 0.0)
        tl.store(advantages_ptr + rows, (base + bonus).to(dtype), mask=row_mask)
        tl.store(base_ptr + rows, base.to(dtype), mask=row_mask)
        tl.store(bonus_ptr + rows, bonus.to(dtype), mask=row_mask)
        tl.store(eta_ptr + rows, eta.to(dtype), mask=row_mask)
        if SOURCE < PACKED:
            tl.store(scores_ptr + rows, score.to(dtype), mask=row_mask)
        tl.store(
            mean_ptr + rows, (first + mean_diff + tl.zeros_like(base)).to(dtype), mask=row_mask
        )
        tl.store(std_ptr + rows, (std + tl.zeros_like(base)).to(dtype), mask=row_mask)


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def _sequence_logprobs_kernel(
    token_logprobs_ptr, cu_seqlens_ptr, scores_ptr, lengths_ptr, is_mean, BLOCK_T: tl.constexpr
):
    """A program per sequence."""
    rows = tl.program_id(0) + tl.arange(0, 1)
    total, length = _token_sums(
        rows, rows >= 0, token_logprobs_ptr, cu_seqlens_ptr, cu_seqlens_ptr, 0, True, 1, BLOCK_T
    )
    if is_mean:
        total = total / tl.maximum(length, 1).to(tl.float64)
    tl.store(scores_ptr + rows, total.to(scores_ptr.dtype.element_ty))
    tl.store(lengths_ptr + rows, length)


# fmt: on


def sequence_logprobs_fwd(
    token_logprobs: Tensor, cu_seqlens: Tensor, normalize: str
) -> tuple[Tensor, Tensor]:
    """(scores (S,), lengths (S,) int64): sums over each sequence, divided by its length for "mean".

    token_logprobs (T,) contiguous, any float dtype; cu_seqlens (S+1,) int32 or int64. Scores are
    float32 (float64 for float64), 0 for length 0. One launch.
    """
    num_seqs = cu_seqlens.shape[0] - 1
    dtype = torch.float64 if token_logprobs.dtype == torch.float64 else torch.float32
    scores = torch.empty(num_seqs, dtype=dtype, device=token_logprobs.device)
    lengths = torch.empty(num_seqs, dtype=torch.int64, device=token_logprobs.device)
    if num_seqs > 0:
        with device_of(token_logprobs):
            _sequence_logprobs_kernel[(num_seqs,)](
                *(token_logprobs, cu_seqlens, scores, lengths, int(normalize == "mean")),
                BLOCK_T=ROWS_PER_TILE * TOKENS_PER_TILE,
                **TOKEN_OPTIONS,
            )
    return scores, lengths


def _batch_partials(rewards: Tensor) -> Tensor:
    """(blocks, 3) float64: count, mean and squares about it of the scored rows of each block."""
    num_blocks = triton.cdiv(rewards.numel(), BATCH_BLOCK)
    partials = rewards.new_empty((num_blocks, 3), dtype=torch.float64)
    _batch_moments_kernel[(num_blocks,)](
        rewards, partials, rewards.numel(), BLOCK_S=BATCH_BLOCK, **TOKEN_OPTIONS
    )
    return partials


def xrpo_advantages_fwd(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(advantages, base, bonus, eta, scores, mean, std), each (S,) in the dtype of rewards.

    rewards (S,) float32 or float64; scores (S,), or token_logprobs (T,) with cu_seqlens (S+1,), or
    (S, L) with token_mask (S, L) bool, or none of them; cu_groups (P+1,); correct, exclude (S,)
    bool; all contiguous. One launch; one more for scale "batch", and for float64 rewards without
    `correct`, which are compared with full_reward before it is rounded to a float32 argument.
    """
    num_seqs, num_groups = rewards.numel(), cu_groups.numel() - 1
    outputs = tuple(torch.empty_like(rewards) for _ in range(7))
    if num_seqs == 0 or num_groups == 0:
        return outputs  # type: ignore[return-value]
    if correct is None and rewards.dtype == torch.float64:
        correct = rewards >= full_reward
    given, source = rewards if scores is None else scores, NONE if scores is None else SCORES
    if token_logprobs is not None:
        source = PACKED if token_mask is None else PADDED
        given = rewards.new_empty(num_seqs, dtype=torch.float64)
    flags = [None if x is None else x.view(torch.uint8) for x in (token_mask, correct, exclude)]
    absent = rewards.view(torch.uint8)
    mask_ptr, correct_ptr, exclude_ptr = (absent if x is None else x for x in flags)
    with device_of(rewards):
        partials = _batch_partials(rewards) if scale == "batch" else rewards
        _xrpo_advantages_kernel[(num_groups,)](
            *(rewards, given, rewards if token_logprobs is None else token_logprobs),
            *(cu_groups if cu_seqlens is None else cu_seqlens, mask_ptr, cu_groups),
            *(correct_ptr, exclude_ptr, partials, *outputs),
            *(1 if token_mask is None else token_mask.shape[1], partials.shape[0]),
            *(float(full_reward), float(novelty_weight), float(novelty_clip), float(eps), ddof),
            *(int(x) for x in (scale != "none", scale == "batch")),
            *(int(x is not None) for x in (correct, exclude)),
            SOURCE=source,
            BLOCK_S=ROWS_PER_BLOCK,
            ROWS=ROWS_PER_TILE,
            BLOCK_T=TOKENS_PER_TILE,
            **(TOKEN_OPTIONS if token_logprobs is not None else STATS_OPTIONS),
        )
    return outputs  # type: ignore[return-value]

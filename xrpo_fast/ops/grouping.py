"""Groups of rows, given by offsets or by ids. Legend: P groups, S rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from xrpo_fast.ops import checks
from xrpo_fast.ops.sequences import check_offsets


def grouping(
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
    # Rows that start no group write what already stands at the end: no sync, and no atomic minimum.
    group = torch.where(is_start, is_start.cumsum(0) - 1, num_seqs)
    start = torch.where(is_start, torch.arange(num_seqs, device=ids.device), num_seqs)
    return cu_groups.scatter_(0, group, start), order


def scored_rows(rewards: Tensor, cu_groups: Tensor) -> Tensor:
    """(S,) int64: number of scored rows in each row's group."""
    offsets = cu_groups.long()
    before = rewards.new_zeros(rewards.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(~rewards.isnan(), 0, out=before[1:])
    count = before[offsets].diff()
    return count.repeat_interleave(offsets.diff(), output_size=rewards.shape[0])


def restored(rows: Sequence[Tensor], order: Tensor | None) -> Sequence[Tensor]:
    """Rows sorted by `order`, back in the caller's order."""
    if order is None:
        return rows
    inverse = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.shape[0], device=order.device)
    )
    return [x[inverse] for x in rows]

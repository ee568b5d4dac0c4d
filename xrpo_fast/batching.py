"""Training rows -> mini-batches (one update each) -> micro-batches (one forward, one backward).

A mini-batch is cut by prompt, before any row is left out; its denominators count all its rows. Rows
that carry no gradient then never enter a micro-batch, and no cut into micro-batches changes the
loss. Dimensions: B rows of a micro-batch, L padded length, T scored tokens.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xrpo_fast.types import MicroBatch, MiniBatch, TrainingRow


def cut_mini_batches(
    rows: Sequence[TrainingRow], cuts: Sequence[Sequence[int]], *, keep_all: bool
) -> list[MiniBatch]:
    """One mini-batch per cut: the rows of its prompts.

    Args:
        rows: rows of the step, in any order; a row's group is its prompt's position.
        cuts: the prompts of each mini-batch, see `cut_groups`; rows of no cut are left out.
        keep_all: keep rows of zero advantage too: they have gradient when there is a KL term.
    """
    batches = []
    for cut in cuts:
        members = set(cut)
        inside = [row for row in rows if row.group in members]
        batches.append(
            MiniBatch(
                rows=[row for row in inside if carries_gradient(row, keep_all)],
                num_rows=sum(row.token_weight for row in inside),
                num_tokens=sum(row.token_weight * len(row.response_ids) for row in inside),
            )
        )
    return batches


def cut_groups(groups: Sequence[int], num_updates: int) -> list[Sequence[int]]:
    """The prompts in num_updates parts, as even as whole prompts allow; fewer where they are."""
    if not groups:
        return []
    num_updates = min(num_updates, len(groups))
    edges = [round(i * len(groups) / num_updates) for i in range(num_updates + 1)]
    return [groups[low:high] for low, high in itertools.pairwise(edges)]


def carries_gradient(row: TrainingRow, keep_all: bool) -> bool:
    """False for empty, weightless and zero-advantage rows: their gradient is exactly zero."""
    if not row.response_ids or row.token_weight == 0 or not row.is_trained:
        return False
    return keep_all or row.advantage != 0


def cut_micro_batches(rows: Sequence[TrainingRow], max_padded_tokens: int) -> list[list[int]]:
    """Indices of rows, sorted by length and packed so that B times L stays within the budget.

    A single row longer than the budget is a micro-batch of its own.
    """
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    for i in order:
        # The first row of a batch is its longest.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_padded_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def collate(rows: Sequence[TrainingRow], *, pad_token_id: int, device: torch.device) -> MicroBatch:
    """Rows as one padded micro-batch on the device, in one transfer per field."""
    num_rows = len(rows)
    ends = np.array([len(row.prompt_ids) + len(row.response_ids) for row in rows])
    counts = np.array([len(row.response_ids) for row in rows])
    width = int(ends.max())
    input_ids = np.full((num_rows, width), pad_token_id, dtype=np.int64)
    for i, row in enumerate(rows):
        input_ids[i, : ends[i]] = row.prompt_ids + row.response_ids
    row_index = np.repeat(np.arange(num_rows), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    token_positions = np.repeat(ends - counts, counts) + within
    flat = row_index * width + token_positions

    def packed(fields: list[np.ndarray | None]) -> Tensor | None:
        if all(field is None for field in fields):
            return None
        filled = [
            np.full(count, np.nan, np.float32) if field is None else field
            for field, count in zip(fields, counts, strict=True)
        ]
        return to_device(np.concatenate(filled).astype(np.float32, copy=False))

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    sampler = packed([row.sampler_logprobs for row in rows])
    shaped = np.repeat(np.array([row.is_shaped for row in rows]), counts)
    return MicroBatch(
        input_ids=to_device(input_ids),
        attention_mask=to_device((np.arange(width) < ends[:, None]).astype(np.int64)),
        positions=to_device(flat - 1),
        labels=to_device(input_ids.reshape(-1)[flat]),
        row_index=to_device(row_index),
        lengths=to_device(counts.astype(np.float32)),
        row_weights=to_device(np.array([row.token_weight for row in rows], dtype=np.float32)),
        advantages=to_device(
            np.repeat(np.array([row.advantage for row in rows], dtype=np.float32), counts)
        ),
        old_logprobs=packed([row.old_logprobs for row in rows]),
        sampler_logprobs=sampler
        if sampler is not None
        else to_device(np.full(len(flat), np.nan, np.float32)),
        reference_logprobs=packed([row.reference_logprobs for row in rows]),
        is_shaped=to_device(shaped) if shaped.any() else None,
    )

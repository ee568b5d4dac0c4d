"""Cuts into mini- and micro-batches lose nothing, and padded batches say what the rows said."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xrpo_fast.batching import (
    carries_gradient,
    collate,
    cut_groups,
    cut_micro_batches,
    cut_mini_batches,
)
from xrpo_fast.types import TrainingRow

PAD = 5
"""Also a token that rows hold: padding is told by length, never by id."""


def make_row(group=0, prompt=2, response=3, advantage=1.0, weight=1.0, **fields) -> TrainingRow:
    """A row of the given lengths, its tokens counted up so that every place is told apart."""
    start = 100 * group + 10
    return TrainingRow(
        group=group,
        prompt_ids=tuple(range(start, start + prompt)),
        response_ids=tuple(range(start + 50, start + 50 + response)),
        advantage=advantage,
        token_weight=weight,
        **fields,
    )


@st.composite
def ragged_rows(draw) -> list[TrainingRow]:
    """Rows of several prompts in any order; zero advantages, weights and lengths occur."""
    num_groups = draw(st.integers(1, 7))
    return draw(
        st.lists(
            st.builds(
                make_row,
                group=st.integers(0, num_groups - 1),
                prompt=st.integers(1, 5),
                response=st.integers(0, 9),
                advantage=st.sampled_from([0.0, 1.0, -0.5]),
                weight=st.sampled_from([0.0, 1.0, 0.25]),
            ),
            min_size=1,
            max_size=30,
        )
    )


@settings(max_examples=100, deadline=None)
@given(rows=ragged_rows(), num_updates=st.integers(1, 9), keep_all=st.booleans())
def test_mini_batches_partition_the_prompts(rows, num_updates, keep_all):
    num_groups = max(row.group for row in rows) + 1
    batches = cut_mini_batches(rows, cut_groups(range(num_groups), num_updates), keep_all=keep_all)
    assert len(batches) == min(num_updates, num_groups)
    kept = [id(row) for batch in batches for row in batch.rows]
    assert len(kept) == len(set(kept))
    assert set(kept) == {id(row) for row in rows if carries_gradient(row, keep_all)}
    groups = [{row.group for row in batch.rows} for batch in batches]
    assert all(a.isdisjoint(b) for i, a in enumerate(groups) for b in groups[:i])
    # Weights are sums of quarters, exact in floating point.
    assert sum(batch.num_rows for batch in batches) == sum(row.token_weight for row in rows)
    assert sum(batch.num_tokens for batch in batches) == sum(
        row.token_weight * len(row.response_ids) for row in rows
    )


@pytest.mark.parametrize("num_updates", [1, 2, 3, 4, 5, 8])
def test_mini_batches_are_as_even_as_whole_prompts_allow(num_updates):
    rows = [make_row(group) for group in range(10) for _ in range(2)]
    batches = cut_mini_batches(rows, cut_groups(range(10), num_updates), keep_all=False)
    sizes = [len({row.group for row in batch.rows}) for batch in batches]
    assert sum(sizes) == 10
    assert max(sizes) - min(sizes) <= 1


def test_denominators_count_rows_that_are_left_out():
    rows = [
        make_row(0, response=4),
        make_row(0, response=6, advantage=0.0),
        make_row(0, response=0),
        make_row(0, response=5, weight=0.0),
    ]
    (batch,) = cut_mini_batches(rows, [range(1)], keep_all=False)
    assert batch.rows == [rows[0]]
    assert (batch.num_rows, batch.num_tokens) == (3.0, 10.0)


@pytest.mark.parametrize(
    ("row", "keep_all", "expected"),
    [
        (make_row(), False, True),
        (make_row(advantage=0.0), False, False),
        (make_row(advantage=0.0), True, True),
        (make_row(response=0), True, False),
        (make_row(weight=0.0), True, False),
        (make_row(advantage=1.0, is_trained=False), True, False),
    ],
    ids=["plain", "zero-advantage", "zero-advantage-kl", "empty", "weightless", "tree"],
)
def test_carries_gradient(row, keep_all, expected):
    assert carries_gradient(row, keep_all) is expected


@settings(max_examples=100, deadline=None)
@given(rows=ragged_rows(), budget=st.integers(1, 60))
def test_micro_batches_hold_each_row_once_within_the_budget(rows, budget):
    batches = cut_micro_batches(rows, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for batch in batches:
        width = max(len(rows[i].prompt_ids) + len(rows[i].response_ids) for i in batch)
        assert len(batch) == 1 or len(batch) * width <= budget


def test_micro_batches_put_equal_lengths_together():
    rows = [make_row(response=n) for n in (1, 30, 1, 30, 1, 30)]
    batches = cut_micro_batches(rows, 96)
    assert {frozenset(batch) for batch in batches} == {frozenset({1, 3, 5}), frozenset({0, 2, 4})}


def test_no_rows_no_batches():
    assert cut_micro_batches([], 100) == []


@settings(max_examples=60, deadline=None)
@given(rows=ragged_rows())
def test_collated_labels_are_the_responses_and_positions_point_before_them(rows):
    rows = [row for row in rows if row.response_ids]
    if not rows:
        return
    batch = collate(rows, pad_token_id=PAD, device=torch.device("cpu"))
    width = batch.input_ids.shape[1]
    expected = [token for row in rows for token in row.response_ids]
    assert batch.labels.tolist() == expected
    # The token that a position predicts is the one right after it.
    flat = batch.input_ids.reshape(-1)
    assert flat[batch.positions + 1].tolist() == expected
    assert (batch.positions // width).tolist() == batch.row_index.tolist()
    assert batch.lengths.tolist() == [len(row.response_ids) for row in rows]
    assert batch.row_weights.tolist() == [row.token_weight for row in rows]
    for i, row in enumerate(rows):
        tokens = row.prompt_ids + row.response_ids
        num = len(tokens)
        assert batch.input_ids[i, :num].tolist() == list(tokens)
        assert (batch.input_ids[i, num:] == PAD).all()
        assert batch.attention_mask[i].tolist() == [1] * num + [0] * (width - num)
        assert (batch.advantages[batch.row_index == i] == row.advantage).all()


def test_padding_is_told_by_length_where_tokens_equal_the_pad_id():
    row = TrainingRow(group=0, prompt_ids=(PAD, 1), response_ids=(PAD, 2, PAD), advantage=1.0)
    longer = make_row(1, prompt=4, response=4)
    batch = collate([row, longer], pad_token_id=PAD, device=torch.device("cpu"))
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert batch.labels[:3].tolist() == [PAD, 2, PAD]


def test_first_response_token_is_predicted_by_the_last_of_the_prompt():
    batch = collate([make_row(prompt=3, response=2)], pad_token_id=0, device=torch.device("cpu"))
    assert batch.positions.tolist() == [2, 3]


def test_optional_fields():
    old = np.array([-1.0, -2.0, -3.0], np.float32)
    rows = [
        make_row(0, old_logprobs=old, sampler_logprobs=old, is_shaped=True),
        make_row(1, old_logprobs=old - 1, advantage=2.0),
    ]
    batch = collate(rows, pad_token_id=0, device=torch.device("cpu"))
    assert batch.old_logprobs is not None
    assert batch.is_shaped is not None
    assert batch.old_logprobs.tolist() == [-1, -2, -3, -2, -3, -4]
    assert batch.sampler_logprobs[:3].tolist() == [-1, -2, -3]
    assert batch.sampler_logprobs[3:].isnan().all(), "no sampler log-probs under a swapped prompt"
    assert batch.is_shaped.tolist() == [True] * 3 + [False] * 3
    assert batch.advantages.tolist() == [1, 1, 1, 2, 2, 2]
    assert batch.reference_logprobs is None
    plain = collate([make_row()], pad_token_id=0, device=torch.device("cpu"))
    assert plain.old_logprobs is None
    assert plain.is_shaped is None
    assert plain.sampler_logprobs.isnan().all()

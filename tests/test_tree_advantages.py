"""Advantages from subtrees against their definition in plain loops, and preset treepo's loss."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xrpo_fast.advantages import (
    fill_advantages,
    make_rows,
    shape_advantages,
    step_rewards,
    tree_advantages,
)
from xrpo_fast.batching import cut_groups, cut_mini_batches
from xrpo_fast.config_file import make_config
from xrpo_fast.objectives import OBJECTIVES
from xrpo_fast.objectives.common import LossInputs, LossScale

TOLERANCE = 1e-10
NAN = math.nan

Leaf = tuple[int, tuple[int, ...], float, int]
"""(tree, ancestors, reward, tokens)"""


def transcribed(leaves: list[Leaf]) -> list[float]:
    """The definition, one leaf and one ancestor at a time."""

    def mean_below(tree: int, node: int) -> tuple[float, int]:
        below = [r for t, path, r, _ in leaves if t == tree and node in path and r == r]
        return math.fsum(below) / max(len(below), 1), len(below)

    leads = []
    for tree, path, reward, _ in leaves:
        own = []
        for depth, node in enumerate(path):
            mean, count = mean_below(tree, node)
            if depth == 0 or count > 1:
                own.append(reward - mean)
        leads.append(math.fsum(own) / len(own))

    def is_kept(leaf: Leaf) -> bool:
        scored = {r for t, _, r, _ in leaves if t == leaf[0] and r == r}
        return leaf[2] == leaf[2] and len(scored) > 1 and leaf[3] > 0

    tokens = [
        lead
        for lead, leaf in zip(leads, leaves, strict=True)
        for _ in range(leaf[3] * is_kept(leaf))
    ]
    if not tokens:
        return [0.0] * len(leaves)
    mean = math.fsum(tokens) / len(tokens)
    std = math.sqrt(math.fsum((token - mean) ** 2 for token in tokens) / len(tokens))
    return [
        (lead - mean) / (std + 1e-6) if is_kept(leaf) else 0.0
        for lead, leaf in zip(leads, leaves, strict=True)
    ]


def ours(leaves: list[Leaf]) -> np.ndarray:
    trees, paths, rewards, tokens = zip(*leaves, strict=True)
    return tree_advantages(np.array(rewards, dtype=np.float64), trees, paths, tokens)


@st.composite
def forests(draw: st.DrawFn) -> list[Leaf]:
    """Up to four trees, each grown by hanging nodes below others; leaves below any node."""
    leaves = []
    for tree in range(draw(st.integers(1, 4))):
        paths: list[tuple[int, ...]] = [(0,)]
        for node in range(1, draw(st.integers(1, 9))):
            paths.append((*draw(st.sampled_from(paths)), node))
        for _ in range(draw(st.integers(1, 8))):
            reward = draw(st.sampled_from([0.0, 1.0, 0.1, -0.75, NAN]))
            leaves.append((tree, draw(st.sampled_from(paths)), reward, draw(st.integers(0, 20))))
    return leaves


@given(forests())
def test_advantages_are_those_of_the_definition(leaves: list[Leaf]) -> None:
    np.testing.assert_allclose(ours(leaves), transcribed(leaves), rtol=0, atol=1e-8)


@given(forests())
def test_whitened_over_the_tokens_that_are_kept(leaves: list[Leaf]) -> None:
    advantages = ours(leaves)
    counts = [n if advantage else 0 for advantage, (*_, n) in zip(advantages, leaves, strict=True)]
    tokens = np.repeat(advantages, counts)
    # Leads that differ by rounding alone are not blown up to a standard deviation of 1.
    if len(tokens) and tokens.std() > 1e-6:
        assert tokens.mean() == pytest.approx(0, abs=1e-9)
        assert tokens.std() == pytest.approx(1, abs=1e-4)


@given(forests(), st.sampled_from([-3.0, 0.5, 100.0]))
def test_the_same_for_rewards_shifted_and_trees_renumbered(
    leaves: list[Leaf], shift: float
) -> None:
    moved = [(7 - t, tuple(9 * j + 2 for j in path), r + shift, n) for t, path, r, n in leaves]
    np.testing.assert_allclose(ours(moved), ours(leaves), rtol=0, atol=1e-6)


def test_by_hand() -> None:
    # Means: root 1/2, node 1 (three leaves) 2/3, node 2 (one leaf) does not count.
    leaves = [(0, (0, 1), 1.0, 5), (0, (0, 1), 1.0, 5), (0, (0, 1), 0.0, 5), (0, (0, 2), 0.0, 5)]
    leads = np.array([5 / 12, 5 / 12, -7 / 12, -1 / 2])
    expected = (leads - leads.mean()) / leads.std()
    np.testing.assert_allclose(ours(leaves), expected, atol=1e-5)


def test_only_the_root_is_the_mean_of_the_group() -> None:
    rewards, tokens, groups = np.array([1.0, 0, 0, 1, 0]), [3, 9, 2, 4, 8], [0, 0, 0, 1, 1]
    leads = rewards - np.array([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2])
    mean = np.average(leads, weights=tokens)
    std = np.sqrt(np.average((leads - mean) ** 2, weights=tokens))
    advantages = tree_advantages(rewards, groups, [(0,)] * 5, tokens)
    np.testing.assert_allclose(advantages, (leads - mean) / (std + 1e-6), atol=1e-12)


def test_dead_trees_and_unscored_leaves_change_nothing() -> None:
    own = [(0, (0, 1), 1.0, 5), (0, (0, 1), 0.0, 7), (0, (0, 2), 0.0, 3), (0, (0, 2), 1.0, 9)]
    dead = [(1, (0, 1), 1.0, 50), (1, (0, 2), 1.0, 60)]
    unscored = [(0, (0, 1), NAN, 70), (2, (0,), NAN, 80)]
    advantages = ours([*own, *dead, *unscored])
    np.testing.assert_array_equal(advantages[4:], 0)
    np.testing.assert_allclose(advantages[:4], ours(own), atol=1e-14)
    assert (ours(dead) == 0).all()


RAGGED = [
    # (tree, ancestors, reward, tokens, ended): mixed of four, dead of two, mixed of three.
    (0, (0, 1, 3), 1.0, 5, "stop"),
    (0, (0, 1, 3), 0.0, 1, "stop"),
    (0, (0, 1), 1.0, 13, "stop"),
    (0, (0, 2), 0.0, 9, "length"),
    (1, (0, 1), 0.0, 6, "stop"),
    (1, (0, 1), 0.0, 2, "stop"),
    (2, (0,), NAN, 4, "stop"),
    (2, (0, 1), 1.0, 2, "stop"),
    (2, (0, 1), 0.0, 7, "stop"),
]


def random_logprobs(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(new, old) of each row of RAGGED in float64, ratios well outside the clip range."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for *_, length, _ in RAGGED:
        noise = torch.randn(2, length, generator=generator, dtype=torch.float64)
        old = -noise[0].abs() - 0.5
        pairs.append(((old + 0.5 * noise[1]).clamp(max=-1e-3).requires_grad_(), old))
    return pairs


def transcribed_loss(pairs: list, counted: list[bool]) -> torch.Tensor:
    """TreePO's equation: one sum over the tokens of live groups, over their number."""
    leaves = [
        (tree, path, reward, length if is_counted else 0)
        for (tree, path, reward, length, _), is_counted in zip(RAGGED, counted, strict=True)
    ]
    advantages = transcribed(leaves)
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for (tree, _, reward, length, _), advantage, is_counted, (new, old) in zip(
        RAGGED, advantages, counted, pairs, strict=True
    ):
        if tree == 1 or reward != reward or not is_counted:
            continue
        num_tokens += length
        for t in range(length):
            ratio = torch.exp(new[t] - old[t])
            clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.28)
            total = total + torch.minimum(ratio * advantage, clipped * advantage)
    return -total / num_tokens


@pytest.mark.parametrize("truncated", ["keep", "mask"])
@pytest.mark.parametrize("per_micro_batch", [1, 2, 9])
def test_loss_of_the_preset_is_that_of_the_equation(
    per_micro_batch: int, truncated: str, make_rollout
) -> None:
    config = make_config({"algorithm": "treepo", "loss": {"truncated": truncated}})
    rollouts = []
    for i, (tree, path, reward, length, ended) in enumerate(RAGGED):
        rollout = make_rollout(
            tree, reward, sample_index=i, token_ids=(7,) * length, finish_reason=ended
        )
        rollout.ancestors = path
        rollouts.append(rollout)
    rows = make_rows(rollouts, config.icl)
    rewards = step_rewards(rollouts, config.loss, 16)
    shaped = shape_advantages(
        rows, rollouts, rewards, loss=config.loss, novelty=config.novelty, tree=config.tree
    )
    advantages = shaped.advantages.double().numpy()
    fill_advantages(rows, rollouts, rewards, advantages, loss=config.loss, icl=config.icl)
    cuts = cut_groups([0, 1, 2], config.optim.updates_per_step)
    (batch,) = cut_mini_batches(rows, cuts, keep_all=False)
    pairs = random_logprobs(per_micro_batch)
    of_row = {id(row): pair for row, pair in zip(rows, pairs, strict=True)}
    scale = LossScale(
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        dual_clip=config.loss.dual_clip,
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
        max_response_tokens=16,
    )
    loss = torch.zeros((), dtype=torch.float64)
    for low in range(0, len(batch.rows), per_micro_batch):
        part = batch.rows[low : low + per_micro_batch]
        lengths = torch.tensor([len(row.response_ids) for row in part])
        row_index = torch.repeat_interleave(torch.arange(len(part)), lengths)
        own = torch.tensor([row.advantage for row in part], dtype=torch.float64)
        inputs = LossInputs(
            token_logprobs=torch.cat([of_row[id(row)][0] for row in part]),
            old_logprobs=torch.cat([of_row[id(row)][1] for row in part]),
            advantages=own[row_index],
            row_weights=torch.tensor([row.token_weight for row in part], dtype=torch.float64),
            row_index=row_index,
            lengths=lengths.double(),
        )
        loss = loss + OBJECTIVES[config.loss.objective].loss(inputs, scale).loss
    counted = [truncated == "keep" or ended == "stop" for *_, ended in RAGGED]
    truth = transcribed_loss(pairs, counted)
    assert loss.item() == pytest.approx(truth.item(), abs=TOLERANCE)
    new = [pair[0] for pair in pairs]
    gradients = torch.autograd.grad(loss, new, allow_unused=True)
    expected = torch.autograd.grad(truth, new, allow_unused=True)
    assert sum(gradient is not None for gradient in gradients) >= 5
    for ours_, theirs in zip(gradients, expected, strict=True):
        assert (ours_ is None) == (theirs is None)
        if ours_ is not None and theirs is not None:
            torch.testing.assert_close(ours_, theirs, rtol=0, atol=TOLERANCE)

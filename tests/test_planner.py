"""The planner against short NumPy versions of the paper's rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrpo_fast.planner import RolloutPlanner

stats = pytest.importorskip("scipy.stats")


def true_priorities(n, s, total, exploration, confidence=0.95):
    quantile = stats.t.ppf((1 + confidence) / 2, [n - 1, n])
    reduction = quantile[0] * s / np.sqrt(n) - quantile[1] * s / np.sqrt(n + 1)
    return reduction + exploration * np.sqrt(np.log(1 + total) / n)


def true_shares(weights, budget):
    """Largest remainder, and the remainder at which ties are cut."""
    weights = weights if weights.sum() > 0 else np.ones_like(weights)
    exact = budget * weights / weights.sum()
    shares = np.floor(exact).astype(int)
    order = np.argsort(-(exact - shares), kind="stable")
    rest = budget - shares.sum()
    shares[order[:rest]] += 1
    return shares, exact


def assert_same_shares(ours, weights, budget):
    truth, exact = true_shares(weights, budget)
    assert ours.sum() == budget
    # Another prompt may get a last unit only where remainders are equal to 1e-9.
    whole = np.floor(exact + 1e-9)
    cut = np.sort(exact - whole)[::-1][int(budget - whole.sum()) - 1]
    for q in np.flatnonzero(ours != truth):
        assert ours[q] in (whole[q], whole[q] + 1)
        assert abs(exact[q] - whole[q] - cut) < 1e-9, (q, ours[q], truth[q], exact[q], cut)


def roll(planner, counts, rng, p, observed):
    """Rolls out `counts`, observes binary rewards in a random order, keeps them per prompt."""
    groups = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    rewards = (rng.random(len(groups)) < p[groups]).astype(float)
    planner.observe(groups, rewards)
    for q, reward in zip(groups, rewards, strict=True):
        observed[q].append(reward)


def deviations(observed):
    return np.array([np.std(rewards, ddof=1) for rewards in observed])


@settings(deadline=None, max_examples=60)
@given(
    num_prompts=st.integers(1, 40),
    base=st.integers(2, 6),
    extra=st.integers(0, 300),
    rounds=st.integers(1, 4),
    exploration=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    confidence=st.floats(0.5, 0.999),
    seed=st.integers(0, 2**32),
)
def test_proportional_rounds_equal_numpy(
    num_prompts, base, extra, rounds, exploration, confidence, seed
):
    rng = np.random.default_rng(seed)
    total = base * num_prompts + extra
    planner = RolloutPlanner(
        num_prompts, total_rollouts=total, base_rollouts=base, rounds=rounds,
        exploration=exploration, confidence=confidence, seed=seed,
    )  # fmt: skip
    p = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], num_prompts)
    observed = [[] for _ in range(num_prompts)]
    counts = planner.plan_round()
    np.testing.assert_array_equal(counts, base)
    roll(planner, counts, rng, p, observed)
    for round_index in range(rounds):
        n = np.array([len(rewards) for rewards in observed])
        s = deviations(observed)
        weights = true_priorities(n, s, n.sum(), exploration, confidence)
        np.testing.assert_allclose(planner.priorities(), weights, rtol=1e-10, atol=1e-14)
        budget = (total - n.sum()) // (rounds - round_index)
        counts = planner.plan_round()
        assert_same_shares(counts, weights, budget)
        roll(planner, counts, rng, p, observed)
    assert planner.is_done
    assert planner.counts.sum() == total
    np.testing.assert_array_equal(planner.plan_round(), 0)


@settings(deadline=None, max_examples=60)
@given(
    num_prompts=st.integers(1, 25),
    extra=st.integers(0, 200),
    exploration=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_greedy_gives_each_rollout_to_the_largest_priority(num_prompts, extra, exploration, seed):
    rng = np.random.default_rng(seed)
    planner = RolloutPlanner(
        num_prompts, total_rollouts=4 * num_prompts + extra, base_rollouts=4, rounds=1,
        exploration=exploration, allocation="greedy", seed=seed,
    )  # fmt: skip
    observed = [[] for _ in range(num_prompts)]
    roll(planner, planner.plan_round(), rng, rng.random(num_prompts), observed)
    s, n = deviations(observed), np.full(num_prompts, 4)
    left = planner.plan_round().copy()
    assert left.sum() == extra
    for _ in range(extra):
        value = true_priorities(n, s, n.sum(), exploration)
        allowed = (value >= value.max() * (1 - 1e-12)) & (left > 0)
        assert allowed.any(), (n, left, value)
        q = np.argmax(allowed)
        n[q] += 1
        left[q] -= 1
    assert not left.any()

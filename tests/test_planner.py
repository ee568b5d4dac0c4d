"""Phases of the planner against short NumPy versions of the paper's rule.

P prompts of the step. The truth is written with SciPy's quantiles and NumPy's standard deviation.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from xrpo_fast.planner import RolloutPlanner

FEW = settings(deadline=None, max_examples=30)


def true_priorities(n, s, drawn, exploration, confidence=0.95):
    quantile = stats.t.ppf((1 + confidence) / 2, [n - 1, n])
    reduction = quantile[0] * s / np.sqrt(n) - quantile[1] * s / np.sqrt(n + 1)
    return reduction + exploration * np.sqrt(np.log(1 + drawn) / n)


def assert_largest_remainder(shares, weights, budget):
    """`shares` are a largest-remainder split; which of equal remainders (1e-9) got one is free."""
    weights = weights if weights.sum() > 0 else np.ones_like(weights)
    exact = budget * weights / weights.sum()
    whole = np.floor(exact + 1e-9)
    remainder = exact - whole
    assert shares.sum() == budget
    got_one = shares - whole == 1
    np.testing.assert_array_equal(shares, whole + got_one)
    if got_one.any() and not got_one.all():
        assert remainder[got_one].min() >= remainder[~got_one].max() - 1e-9


def roll(planner, counts, rng, p):
    """Rolls out `counts` with pass rates p and observes the rewards in a random order."""
    groups = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    rewards = (rng.random(len(groups)) < p[groups]).astype(float)
    planner.observe(groups, rewards)
    return groups, rewards


def after_base(num_prompts, seed, *, total, base=4, **options):
    """A planner whose base results are in, and the rewards of each prompt."""
    rng = np.random.default_rng(seed)
    planner = RolloutPlanner(
        num_prompts, total_rollouts=total, base_rollouts=base, seed=seed, **options
    )
    rewards = (rng.random((num_prompts, base)) < rng.random((num_prompts, 1))).astype(float)
    assert (planner.plan_round() == base).all()
    planner.observe(np.repeat(np.arange(num_prompts), base), rewards.ravel())
    return planner, rewards


@FEW
@given(
    num_prompts=st.integers(1, 40),
    base=st.integers(2, 6),
    extra=st.integers(0, 300),
    rounds=st.integers(1, 4),
    exploration=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    confidence=st.floats(0.5, 0.999),
    is_binary=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_proportional_rounds_equal_numpy(
    num_prompts, base, extra, rounds, exploration, confidence, is_binary, seed
):
    rng = np.random.default_rng(seed)
    total = base * num_prompts + extra
    planner = RolloutPlanner(
        num_prompts, total_rollouts=total, base_rollouts=base, rounds=rounds,
        exploration=exploration, confidence=confidence, seed=seed,
    )  # fmt: skip
    observed = [[] for _ in range(num_prompts)]
    for round_index in range(rounds + 1):
        n = np.array([len(rewards) for rewards in observed])
        counts = planner.plan_round()
        if round_index == 0:
            np.testing.assert_array_equal(counts, base)
        else:
            s = np.array([np.std(rewards, ddof=1) for rewards in observed])
            weights = true_priorities(n, s, n.sum(), exploration, confidence)
            budget = (total - n.sum()) // (rounds - round_index + 1)
            assert_largest_remainder(counts, weights, budget)
        groups = np.repeat(np.arange(num_prompts), counts)
        rewards = rng.normal(3.0, 2.0, len(groups))
        if is_binary:
            rewards = (rewards > 4.0).astype(float)
        planner.observe(groups, rewards)
        for group, reward in zip(groups, rewards, strict=True):
            observed[group].append(reward)
        n = np.array([len(rewards) for rewards in observed])
        s = np.array([np.std(rewards, ddof=1) for rewards in observed])
        truth = true_priorities(n, s, n.sum(), exploration, confidence)
        np.testing.assert_allclose(planner.priorities(), truth, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(planner.stds, s, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(planner.means, [np.mean(r) for r in observed], rtol=1e-12)
    assert planner.is_done
    assert planner.counts.sum() == total
    np.testing.assert_array_equal(planner.plan_round(), 0)


@FEW
@given(
    num_prompts=st.integers(1, 25),
    extra=st.integers(0, 200),
    exploration=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_greedy_gives_each_rollout_to_the_largest_priority(num_prompts, extra, exploration, seed):
    planner, rewards = after_base(
        num_prompts, seed, total=4 * num_prompts + extra, rounds=1,
        exploration=exploration, allocation="greedy",
    )  # fmt: skip
    s, n = rewards.std(axis=1, ddof=1), np.full(num_prompts, 4)
    left = planner.plan_round()
    assert left.sum() == extra
    for _ in range(extra):
        value = true_priorities(n, s, n.sum(), exploration)
        is_largest = (value >= value.max() * (1 - 1e-12)) & (left > 0)
        assert is_largest.any(), (n, left, value)
        q = int(np.argmax(is_largest))
        n[q] += 1
        left[q] -= 1
    assert not left.any()


@FEW
@given(
    allocation=st.sampled_from(["proportional", "greedy", "uniform"]),
    std=st.sampled_from(["sample", "jeffreys", "pooled"]),
    mode=st.sampled_from(["absolute", "relative"]),
    cap=st.sampled_from([None, 9]),
    seed=st.integers(0, 2**32),
)
def test_plan_does_not_depend_on_the_order_of_prompts(allocation, std, mode, cap, seed):
    rng = np.random.default_rng(seed)
    num_prompts, rounds = 23, 2
    outcomes = (rng.random((num_prompts, 200)) < rng.random((num_prompts, 1))).astype(float)
    permutation = rng.permutation(num_prompts)
    plans = []
    for order in (np.arange(num_prompts), permutation):
        planner = RolloutPlanner(
            num_prompts, total_rollouts=187, base_rollouts=4, rounds=rounds, allocation=allocation,
            std=std, exploration_mode=mode, max_rollouts_per_prompt=cap, seed=7,
        )  # fmt: skip
        planner.begin_step([f"prompt-{q}" for q in order], step=3)
        counts = np.zeros((rounds + 1, num_prompts), int)
        used = np.zeros(num_prompts, int)
        for round_counts in counts:
            round_counts[:] = planner.plan_round()
            for position, q in enumerate(order):
                part = outcomes[q, used[q] : used[q] + round_counts[position]]
                planner.observe(np.full(len(part), position), part)
                used[q] += len(part)
        by_prompt = np.empty_like(counts)
        by_prompt[:, order] = counts
        plans.append(by_prompt)
    np.testing.assert_array_equal(plans[0], plans[1])


def test_ties_break_by_seed_and_step_not_by_position():
    def winners(seed, step):
        planner = RolloutPlanner(100, total_rollouts=450, base_rollouts=4, rounds=1, seed=seed)
        planner.begin_step([f"p{q}" for q in range(100)], step)
        planner.observe(np.repeat(np.arange(100), planner.plan_round()), np.ones(400))
        return tuple(np.flatnonzero(planner.plan_round()))

    choices = {winners(seed, step) for seed in (0, 1) for step in (0, 1)}
    assert len(choices) == 4
    assert all(len(choice) == 50 for choice in choices)
    assert winners(0, 0) == winners(0, 0)
    # A choice by position would take the first or last fifty.
    assert all(15 < sum(q < 50 for q in choice) < 35 for choice in choices)


@pytest.mark.parametrize(
    ("allocation", "plan"),
    [("proportional", [1, 5, 5, 5, 2, 5, 1, 5]), ("greedy", [1, 5, 5, 5, 1, 5, 1, 6])],
)
def test_plan_is_the_same_on_every_machine(allocation, plan):
    planner = RolloutPlanner(8, total_rollouts=90, base_rollouts=4, allocation=allocation, seed=11)
    planner.begin_step([f"problem/{q}" for q in range(8)], step=5)
    planner.plan_round()
    wins = np.array([0, 1, 2, 3, 4, 1, 0, 2])
    for k in range(4):
        planner.observe(np.arange(8), (wins > k).astype(float))
    assert planner.plan_round().tolist() == plan


@FEW
@given(cap=st.integers(4, 12), base=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_cap_holds_and_the_total_is_met(cap, base, seed):
    rng = np.random.default_rng(seed)
    total = int(rng.integers(base * 20, cap * 20 + 1))
    for allocation in ("proportional", "greedy", "uniform"):
        planner = RolloutPlanner(
            20, total_rollouts=total, base_rollouts=base, exploration=0.001,
            allocation=allocation, max_rollouts_per_prompt=cap, seed=seed,
        )  # fmt: skip
        while not planner.is_done:
            roll(planner, planner.plan_round(), rng, np.linspace(0, 1, 20))
        assert planner.counts.max() <= cap
        assert planner.counts.sum() == total


def test_surplus_of_capped_prompts_is_shared_by_the_same_rule():
    rewards = np.array([[0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], float)
    planner = RolloutPlanner(
        4, total_rollouts=43, base_rollouts=4, rounds=1, max_rollouts_per_prompt=14
    )
    planner.plan_round()
    planner.observe(np.repeat(np.arange(4), 4), rewards.ravel())
    weights = true_priorities(np.full(4, 4), rewards.std(axis=1, ddof=1), 16, 0.1)
    counts = planner.plan_round()
    # The cap binds for the first prompt, and then, with its surplus shared, for the second.
    assert 27 * weights[0] / weights.sum() > 10 > 27 * weights[1] / weights.sum()
    assert 17 * weights[1] / weights[1:].sum() > 10
    assert counts[:2].tolist() == [10, 10]
    assert sorted(counts[2:]) == [3, 4]


def test_more_uncertain_prompts_get_no_less():
    planner, rewards = after_base(64, 5, total=64 * 9, rounds=1)
    counts = planner.plan_round()
    s = rewards.std(axis=1, ddof=1)
    for low in np.unique(s):
        assert counts[s == low].max() <= counts[s > low].min(initial=10**6) + 1
    assert counts[s == s.max()].mean() > counts[s == 0].mean()


@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5])
@pytest.mark.parametrize("exploration", [0.0, 0.1])
@pytest.mark.parametrize("allocation", ["proportional", "greedy"])
def test_equal_rewards_share_equally(reward, exploration, allocation):
    planner = RolloutPlanner(
        5, total_rollouts=35, base_rollouts=3, rounds=1, exploration=exploration,
        allocation=allocation,
    )  # fmt: skip
    planner.observe(np.repeat(np.arange(5), planner.plan_round()), np.full(15, reward))
    assert np.isfinite(planner.priorities()).all()
    np.testing.assert_array_equal(planner.stds, 0.0)
    counts = planner.plan_round()
    if exploration > 0 or allocation == "proportional":
        np.testing.assert_array_equal(counts, 4)
    assert counts.sum() == 20


def test_uniform_hands_out_everything_at_once():
    planner = RolloutPlanner(7, total_rollouts=38, base_rollouts=1, allocation="uniform")
    counts = planner.plan_round()
    assert sorted(counts) == [5, 5, 5, 5, 6, 6, 6]
    assert planner.is_done


def test_dapo_refills_until_enough_groups_carry_signal():
    planner = RolloutPlanner(
        12, total_rollouts=48, base_rollouts=4, rounds=2, allocation="dapo"
    )  # 4 groups wanted, 2 refills
    first = planner.plan_round()
    assert first.tolist() == [4] * 4 + [0] * 8
    mixed = np.tile([0.0, 1.0], 2)
    planner.observe(np.repeat([0, 1, 2, 3], 4), np.concatenate([mixed, np.ones(4)] * 2))
    second = planner.plan_round()
    assert second.tolist() == [0] * 4 + [4] * 2 + [0] * 6
    assert not planner.is_done
    planner.observe(np.repeat([4, 5], 4), np.concatenate([mixed, mixed]))
    assert planner.is_done
    assert not planner.plan_round().any()


@pytest.mark.parametrize("kind", ["binary", "real"])
def test_a_plan_shared_among_threads_is_that_of_any_order(kind):
    """More prompts than one part of a loop holds, so that parts run on several threads."""
    num, rng = 300_000, np.random.default_rng(0)
    drawn = rng.normal(size=(num, 2)) if kind == "real" else rng.integers(0, 2, (num, 2))
    order = rng.permutation(num)
    plans = []
    for positions in (np.arange(num), order):
        planner = RolloutPlanner(num, total_rollouts=5 * num, base_rollouts=2, rounds=2)
        planner.begin_step([str(q) for q in positions], 1)
        rounds = [planner.plan_round()]
        planner.observe(np.repeat(np.arange(num), 2), drawn[positions].ravel().astype(float))
        for _ in range(2):
            rounds.append(planner.plan_round())
            assert rounds[-1].sum() == 3 * num // 2
            priorities = planner.priorities()
            planner.observe(np.repeat(np.arange(num), rounds[-1]), np.zeros(3 * num // 2))
        plans.append((rounds, priorities))
    for first, second in zip(plans[0][0], plans[1][0], strict=True):
        np.testing.assert_array_equal(first[order], second)
    np.testing.assert_array_equal(plans[0][1][order], plans[1][1])


@pytest.mark.parametrize("std", ["sample", "jeffreys", "pooled"])
def test_dapo_counts_groups_with_signal_whatever_the_estimate_of_the_spread(std):
    planner = RolloutPlanner(
        8, total_rollouts=32, base_rollouts=4, rounds=1, allocation="dapo", std=std
    )
    for started in ([4, 4, 4, 4, 0, 0, 0, 0], [0, 0, 0, 0, 4, 4, 4, 4]):
        counts = planner.plan_round()
        assert counts.tolist() == started
        planner.observe(np.repeat(np.arange(8), counts), np.zeros(counts.sum()))
    assert planner.is_done


def test_dapo_stops_after_its_refills():
    planner = RolloutPlanner(12, total_rollouts=48, base_rollouts=4, rounds=2, allocation="dapo")
    planned = 0
    while not planner.is_done:
        counts = planner.plan_round()
        planned += counts.sum()
        planner.observe(np.repeat(np.arange(12), counts), np.zeros(counts.sum()))
    assert planned == 48

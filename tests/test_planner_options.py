"""The planner's options beyond the paper, unscored rewards, history, state, and bad input."""

import json

import numpy as np
import pytest
from scipy import special, stats

from xrpo_fast.planner import RolloutPlanner

REWARDS = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], float)
N = np.full(4, 4.0)


def planner_with(rewards=REWARDS, *, total=40, **options):
    num_prompts, base = rewards.shape
    planner = RolloutPlanner(num_prompts, total_rollouts=total, base_rollouts=base, **options)
    planner.plan_round()
    planner.observe(np.repeat(np.arange(num_prompts), base), rewards.ravel())
    return planner


def reduction(s, n=N):
    quantile = stats.t.ppf(0.975, [n - 1, n])
    return quantile[0] * s / np.sqrt(n) - quantile[1] * s / np.sqrt(n + 1)


def bonus(clock, exploration=0.1):
    return exploration * np.sqrt(np.log(1 + clock) / N)


def test_jeffreys_std():
    p = (REWARDS.sum(axis=1) + 0.5) / (N + 1)
    expected = reduction(np.sqrt(p * (1 - p))) + bonus(16)
    np.testing.assert_allclose(planner_with(std="jeffreys").priorities(), expected, rtol=1e-12)


def test_pooled_std():
    variance = REWARDS.var(axis=1, ddof=1)
    s = np.sqrt((2 * variance.mean() + (N - 1) * variance) / (N + 1))
    expected = reduction(s) + bonus(16)
    np.testing.assert_allclose(planner_with(std="pooled").priorities(), expected, rtol=1e-12)


def test_relative_exploration_is_a_fixed_share():
    gain = reduction(REWARDS.std(axis=1, ddof=1))
    priorities = planner_with(exploration_mode="relative").priorities()
    np.testing.assert_allclose(priorities - gain, (priorities - gain)[0], rtol=1e-12)
    assert (priorities - gain).sum() == pytest.approx(0.3 * priorities.sum(), rel=1e-12)


def test_clock_of_the_bonus():
    gain = reduction(REWARDS.std(axis=1, ddof=1))
    for clock, drawn in (("step", 16), ("run", 16 + 16), ("train_step", 9)):
        planner = planner_with(global_rollouts=clock)
        planner.begin_step(list("abcd"), step=9)
        planner.plan_round()
        planner.observe(np.repeat(np.arange(4), 4), REWARDS.ravel())
        np.testing.assert_allclose(planner.priorities(), gain + bonus(drawn), rtol=1e-12)


def test_unscored_rewards_spend_the_slot_only():
    rewards = REWARDS.copy()
    rewards[1] = [0, np.nan, 1, np.nan]
    rewards[3] = np.nan
    planner = planner_with(rewards)
    np.testing.assert_array_equal(planner.counts, 4)
    s = np.array([0.0, np.std([0, 1], ddof=1), REWARDS[2].std(ddof=1), 0.0])
    np.testing.assert_allclose(planner.stds, s, rtol=1e-14)
    np.testing.assert_array_equal(planner.means, [0.0, 0.5, 0.5, np.nan])
    np.testing.assert_allclose(planner.priorities(), reduction(s) + bonus(16), rtol=1e-12)
    assert planner.plan_round().sum() == 12


def test_statistics_survive_a_large_offset():
    rng = np.random.default_rng(0)
    rewards = 1e9 + rng.normal(size=(3, 50))
    planner = planner_with(rewards, total=200)
    exact = (rewards - 1e9).std(axis=1, ddof=1)
    np.testing.assert_allclose(planner.stds, exact, rtol=1e-6)
    np.testing.assert_allclose(planner.means, rewards.mean(axis=1), rtol=1e-15)


def test_statistics_of_binary_rewards_do_not_depend_on_their_order():
    orders = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]], float)
    planner = planner_with(orders, total=12)
    assert len(set(planner.stds)) == 1
    assert len(set(planner.priorities())) == 1


def test_partial_results():
    planner = RolloutPlanner(3, total_rollouts=30, base_rollouts=3)
    planner.plan_round()
    planner.observe([0, 0, 1], [1.0, 0.0, 1.0])
    with pytest.raises(
        RuntimeError, match=r"plan_round: expected the results of all 9 planned rollouts, got 3"
    ):
        planner.plan_round()
    np.testing.assert_array_equal(planner.in_flight, [1, 2, 3])
    counts = planner.plan_round(allow_partial=True)
    assert counts.sum() == 10
    assert counts.argmax() == 0


def test_smaller_step_scales_the_budget():
    planner = RolloutPlanner(8, total_rollouts=64, base_rollouts=4)
    planner.begin_step(["a", "b", "c"], step=1)
    planner.observe(np.repeat(np.arange(3), planner.plan_round()), np.zeros(12))
    assert planner.plan_round().sum() + planner.plan_round(allow_partial=True).sum() == 12
    planner.begin_step(["a", "b", "c"], step=2, total_rollouts=20)
    planner.plan_round()
    planner.plan_round(allow_partial=True)
    planner.plan_round(allow_partial=True)
    assert planner.in_flight.sum() == 20


def expected_yield(wins, n, extra):
    """Gain of one more rollout behind `extra` unknown ones, w = p (1-p)^2, Beta(1/2, 1/2)."""

    def moment(i, j):
        a, b = 0.5 + wins, 0.5 + n - wins
        return special.beta(a + i, b + j) / special.beta(a, b)

    if wins == 0:  # E[p (1-p)^extra w]: the first success
        return moment(2, extra + 2)
    if wins == n:  # E[(1-p) p^extra w]: the first failure
        return moment(extra + 1, 3)
    return moment(1, 2) * (1 / (n + extra) - 1 / (n + extra + 1))


def test_history_allocates_by_expected_yield():
    planner = planner_with(history=True, allocation="greedy", rounds=1, total=60)
    wins = REWARDS.sum(axis=1)
    np.testing.assert_allclose(
        planner.priorities(), [expected_yield(w, 4, 0) for w in wins], rtol=1e-12
    )
    left, extra = planner.plan_round(), np.zeros(4, int)
    assert left.sum() == 44
    for _ in range(44):
        gain = np.array([expected_yield(w, 4, m) for w, m in zip(wins, extra, strict=True)])
        q = int(np.argmax(np.where(left > 0, gain, -1)))
        assert gain[q] >= gain.max() * (1 - 1e-12)
        extra[q] += 1
        left[q] -= 1


def test_history_forgets_and_leaves_out_seeded_rollouts():
    planner = RolloutPlanner(
        2, total_rollouts=10, base_rollouts=3, history=True, allocation="greedy", rounds=1
    )
    planner.begin_step(["x", "y"], step=0)
    planner.plan_round()
    rewards, is_seeded = [1, 0, 1, 0, np.nan, 1], [False, False, True, False, False, True]
    planner.observe([0, 0, 0, 1, 1, 1], rewards, is_seeded)
    planner.begin_step(["x", "z"], step=1)
    assert planner.priors == {"x": (1.5, 1.5), "y": (0.5, 1.5)}
    planner.plan_round()
    planner.observe([0, 0, 0], [1, 1, 1])
    planner.begin_step(["x", "y"], step=2)
    assert planner.priors["x"] == pytest.approx((0.5 + 0.8 * 1.0 + 3, 0.5 + 0.8 * 1.0))
    assert "z" not in planner.priors


def test_refused_step_leaves_the_history_alone():
    planner = RolloutPlanner(
        1, total_rollouts=6, base_rollouts=3, history=True, allocation="greedy", rounds=1
    )
    planner.begin_step(["x"], step=0)
    planner.plan_round()
    planner.observe([0, 0, 0], [1, 1, 0])
    with pytest.raises(ValueError, match=r"total_rollouts: expected at least"):
        planner.begin_step(["x"], step=1, total_rollouts=2)
    assert planner.priors == {}
    planner.begin_step(["x"], step=1)
    assert planner.priors == {"x": (2.5, 1.5)}


def test_history_needs_one_base_rollout_where_the_prior_is_sharp():
    planner = RolloutPlanner(
        3, total_rollouts=24, base_rollouts=4, history=True, allocation="greedy"
    )
    planner.priors = {"known": (0.5, 8.5), "vague": (1.0, 7.0)}
    planner.begin_step(["new", "known", "vague"], step=4)
    assert planner.plan_round().tolist() == [4, 1, 4]
    assert [planner.base_of(prompt) for prompt in range(3)] == [4, 1, 4]
    with pytest.raises(IndexError, match="prompt: out of range"):
        planner.base_of(3)


@pytest.mark.parametrize("std", ["sample", "pooled"])
@pytest.mark.parametrize(
    ("allocation", "history"),
    [
        ("proportional", False),
        ("greedy", False),
        ("streaming", False),
        ("greedy", True),
        ("streaming", True),
    ],
)
def test_resume_in_the_middle_of_a_step_is_exact(allocation, std, history):
    def new_planner():
        return RolloutPlanner(
            16, total_rollouts=160, base_rollouts=4, rounds=3, allocation=allocation, std=std,
            history=history, global_rollouts="run", seed=3,
        )  # fmt: skip

    def work(planner, rng, num_events):
        """A trace of decisions; a reward follows its rollout after a random while."""
        trace, running = [], []
        for _ in range(num_events):
            if allocation == "streaming":
                running += (given := planner.next_prompts(12 - len(running)))
            else:
                given = planner.plan_round().tolist()
                running = list(np.repeat(np.arange(16), given))
            trace.append(given)
            for _ in range(len(running) if allocation != "streaming" else 1):
                if running:
                    q = running.pop(int(rng.integers(len(running))))
                    planner.observe_one(int(q), float(rng.random() < q / 16))
        return trace, running

    rng = np.random.default_rng(1)
    whole, resumed = new_planner(), new_planner()
    for step in range(2):
        whole.begin_step([f"p{q}" for q in range(step, 16 + step)], step)
        work(whole, rng, 90 if allocation == "streaming" else 2)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.state_dict() == whole.state_dict()
    np.testing.assert_array_equal(resumed.priorities(), whole.priorities())
    for planner in (whole, resumed):
        in_flight = np.repeat(np.arange(16), planner.in_flight)
        planner.observe(in_flight, (in_flight > 8).astype(float))
    traces = [work(p, np.random.default_rng(2), 60) for p in (whole, resumed)]
    assert traces[0] == traces[1]
    for planner in (whole, resumed):
        planner.begin_step([f"p{q}" for q in range(16)], 2)
    assert whole.priors == resumed.priors
    assert resumed.state_dict() == whole.state_dict()


OK = {"total_rollouts": 64, "base_rollouts": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_rollouts": 31}, r"total_rollouts: expected at least .* = 4 \* 8 = 32, got 31"),
        ({"total_rollouts": 64.0}, r"total_rollouts: expected an integer >= 1, got 64.0"),
        ({"total_rollouts": 2**31}, r"total_rollouts: expected at most 2147483647, got 2147483648"),
        ({"base_rollouts": 1}, r"base_rollouts: expected at least 2 \(the Student-t interval"),
        (
            {"base_rollouts": 0, "allocation": "uniform"},
            r"base_rollouts: expected an integer >= 1, got 0",
        ),
        ({"confidence": 0.0}, r"confidence: expected 0 < confidence < 1, got 0.0"),
        ({"confidence": 1.0}, r"confidence: expected 0 < confidence < 1, got 1.0"),
        ({"confidence": float("nan")}, r"confidence: expected 0 < confidence < 1, got nan"),
        ({"exploration": -0.1}, r"exploration: expected a finite number >= 0, got -0.1"),
        ({"exploration": float("inf")}, r"exploration: expected a finite number >= 0, got inf"),
        ({"rounds": 0}, r"rounds: expected an integer >= 1, got 0"),
        ({"allocation": "best"}, r"allocation: expected one of proportional, .*, got 'best'"),
        ({"std": "mad"}, r"std: expected one of sample, jeffreys, pooled, got 'mad'"),
        ({"exploration_mode": "x"}, r"exploration_mode: expected one of absolute, .*, got 'x'"),
        ({"global_rollouts": "x"}, r"global_rollouts: expected one of step, run, .*, got 'x'"),
        ({"max_rollouts_per_prompt": 3}, r"max_rollouts_per_prompt: expected .* >= 4, got 3"),
        ({"max_rollouts_per_prompt": 7}, r"max_rollouts_per_prompt: expected .* = 8, got 7"),
        ({"history": True}, r"allocation: expected 'greedy' or 'streaming' with history=True"),
    ],
)
def test_rejects_options(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutPlanner(8, **(OK | options))


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (([8], [1.0]), r"prompt_indices: expected 0 <= index < 8, got 8"),
        (([0, -1], [1.0, 1.0]), r"prompt_indices: expected 0 <= index < 8, got -1"),
        (([0, 0], [1.0, np.inf]), r"rewards: expected finite values .*, got inf \(result 1\)"),
        (([0], [-1e200]), r"rewards: expected finite values up to 1e100, .*, got -1e\+200"),
        (([0] * 5, [1.0] * 5), r"at most the 4 rollouts planned for prompt 0, .* \(result 4\)"),
        (([0, 1], [1.0]), r"rewards: expected shape \(2,\), got \(1,\)"),
        (([0], [1.0], [True, False]), r"is_seeded: expected shape \(1,\), got \(2,\)"),
    ],
    ids=["index", "negative", "infinite", "huge", "too-many", "shape", "seeded-shape"],
)
def test_rejects_results_and_commits_none(results, message):
    planner = RolloutPlanner(8, **OK)
    planner.plan_round()
    with pytest.raises(ValueError, match=message):
        planner.observe(*results)
    assert not planner.counts.any()


def test_rejects_results_of_a_single_rollout():
    planner = RolloutPlanner(8, **OK)
    with pytest.raises(ValueError, match=r"at most the 0 rollouts planned for prompt 2"):
        planner.observe_one(2, 1.0)
    planner.plan_round()
    with pytest.raises(ValueError, match=r"rewards: expected finite values"):
        planner.observe_one(2, float("-inf"))
    with pytest.raises(ValueError, match=r"prompt_indices: expected 0 <= index < 8, got 9"):
        planner.observe_one(9, 1.0)
    with pytest.raises(TypeError, match=r"prompt_indices: expected \(R,\) integers, got float64"):
        planner.observe([0.5], [1.0])
    jeffreys = RolloutPlanner(8, std="jeffreys", **OK)
    jeffreys.plan_round()
    with pytest.raises(ValueError, match=r"rewards: expected 0 or 1 with std='jeffreys'"):
        jeffreys.observe_one(0, 0.5)


def test_rejects_steps_and_states():
    planner = RolloutPlanner(8, **OK)
    with pytest.raises(ValueError, match=r"prompt_ids: expected unique ids .*, got 'b' twice"):
        planner.begin_step(["a", "b", "b"], step=0)
    with pytest.raises(ValueError, match=r"prompt_ids: expected at least one prompt, got none"):
        planner.begin_step([], step=0)
    with pytest.raises(ValueError, match=r"step: expected an integer >= 0, got -1"):
        planner.begin_step(["a"], step=-1)
    with pytest.raises(ValueError, match=r"state: expected version 1, got None"):
        planner.load_state_dict({})
    broken = planner.state_dict()
    del broken["core"]["planned"]
    with pytest.raises(ValueError, match=r"state: expected the key planned, got none"):
        planner.load_state_dict(broken)
    with pytest.raises(RuntimeError, match=r"next_prompt: expected allocation='streaming', got"):
        planner.next_prompt()

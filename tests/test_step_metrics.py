"""A step's numbers, counted by hand on a few rollouts."""

import math

import numpy as np
import pytest

from xrpo_fast.step_metrics import gini, has_signal, novelty_metrics, rollout_metrics
from xrpo_fast.types import TrainingRow


def measured(rollouts):
    return rollout_metrics(rollouts, np.array([r.verdict.reward for r in rollouts]))


@pytest.fixture
def step(make_rollout):
    """Four prompts: mixed; all right; hopeless then flipped by a seeded one; hopeless and stays."""
    return [
        make_rollout(0, 1.0, sample_index=0, token_ids=(1, 2), tier="easy"),
        make_rollout(0, 0.0, sample_index=1, token_ids=(1, 3), tier="easy"),
        make_rollout(1, 1.0, sample_index=0, token_ids=(4,), tier="easy"),
        make_rollout(1, 1.0, sample_index=1, token_ids=(4,), tier="easy"),
        make_rollout(2, 0.0, sample_index=0, token_ids=(5, 5, 5), tier="hard"),
        make_rollout(2, 0.0, sample_index=1, token_ids=(6,) * 4, tier="hard"),
        make_rollout(
            2, 1.0, sample_index=2, token_ids=(7,) * 5, tier="hard", is_seeded=True, round_index=1
        ),
        make_rollout(3, 0.0, sample_index=0, token_ids=(), tier="hard"),
        make_rollout(3, 0.0, sample_index=1, token_ids=(8,) * 6, tier="hard",
                     finish_reason="length"),
        make_rollout(3, 0.0, sample_index=2, token_ids=(8,) * 6, tier="hard", round_index=1,
                     is_seeded=True, finish_reason="length"),
    ]  # fmt: skip


def test_rewards_groups_and_completions(step):
    values = measured(step)
    expected = {
        "reward/mean": 0.4,
        "reward/std": np.std([1, 0, 1, 1, 0, 0, 1, 0, 0, 0], ddof=1),
        "reward/solved_frac": 0.4,
        "reward/errors": 0,
        "reward/unscored": 0,
        "reward/exact/mean": 0.4,
        "groups/zero_variance_frac": 0.5,
        "groups/all_right_frac": 0.25,
        "groups/all_wrong_frac": 0.25,
        "groups/with_signal": 2,
        "completions/mean_length": 3.0,
        "completions/max_length": 6,
        "completions/truncated_frac": 0.2,
        "completions/duplicate_frac": 0.2,
        "tokens/generated": 30,
        "tokens/prompt": 3 * 8 + 5 * 2,
        "tokens/per_effective_group": 15.0,
        "planner/rollouts": 10,
        "planner/rollouts_min": 2,
        "planner/rollouts_max": 3,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_seeding_and_tiers(step):
    values = measured(step)
    expected = {
        "icl/hopeless_prompts": 2,
        "icl/flipped_prompts": 1,
        "icl/flipped_frac": 0.5,
        "icl/seeded_prompts": 2,
        "icl/seeded_rollouts": 2,
        "icl/seeded_solved_frac": 0.5,
        "tier/easy/solved_frac": 0.75,
        "tier/easy/rollouts": 4,
        "tier/hard/solved_frac": 1 / 6,
        "tier/hard/rollouts": 6,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_unscored_rollouts_are_counted_and_left_out(make_rollout):
    values = measured(
        [
            make_rollout(0, 1.0),
            make_rollout(0, float("nan"), sample_index=1, error="timed out", parts={}),
        ]
    )
    assert values["reward/mean"] == 1.0
    assert values["reward/std"] == 0.0
    assert values["reward/exact/mean"] == 1.0
    assert (values["reward/unscored"], values["reward/errors"]) == (1, 1)
    assert values["groups/zero_variance_frac"] == 1.0
    assert math.isnan(values["tokens/per_effective_group"])


def test_groups_have_the_signal_that_the_advantages_saw(make_rollout):
    rollouts = [make_rollout(0, 1.0, sample_index=i) for i in range(2)]
    values = rollout_metrics(rollouts, np.array([1.0, 0.5]))  # the second was overlong
    assert values["reward/mean"] == 1.0
    assert values["groups/with_signal"] == 1
    assert values["groups/zero_variance_frac"] == 0.0


def test_a_step_of_unscored_rollouts_has_no_mean(make_rollout):
    values = measured([make_rollout(0, float("nan"), parts={}, error="died")])
    assert math.isnan(values["reward/mean"])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0], False),
        ([0.3], False),
        ([], False),
        ([math.nan, 1.0], False),
        ([math.nan, 1.0, 0.5], True),
    ],
)
def test_has_signal(rewards, expected):
    assert has_signal(rewards) is expected


@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 2, 3, 10], [0, 0, 8], [5]])
def test_gini_is_the_mean_absolute_difference(counts):
    counts = np.array(counts)
    pairs = np.abs(counts[:, None] - counts[None, :]).mean()
    assert gini(counts) == pytest.approx(pairs / (2 * counts.mean()), abs=1e-12)


def test_gini_of_nothing():
    assert gini(np.array([], dtype=int)) == 0.0
    assert gini(np.array([0, 0])) == 0.0


def rows_of(lengths):
    return [
        TrainingRow(group=0, prompt_ids=(1,), response_ids=(2,) * n, advantage=0.0) for n in lengths
    ]


def test_novelty_correlation_and_deciles():
    lengths = list(range(1, 101))
    bonus = np.array([100.0 - n for n in lengths])
    values = novelty_metrics(rows_of(lengths), bonus)
    assert values["novelty/bonus_mean"] == pytest.approx(bonus.mean())
    assert values["novelty/bonus_rows"] == 99
    assert values["novelty/bonus_length_corr"] == pytest.approx(-1.0)
    mass = [values[f"novelty/bonus_mass/decile_{i}"] for i in range(10)]
    assert sum(mass) == pytest.approx(1.0)
    assert mass == sorted(mass, reverse=True), "short rows have the bonus here"
    assert mass[0] == pytest.approx(bonus[:10].sum() / bonus.sum())


def test_novelty_without_any_bonus():
    values = novelty_metrics(rows_of([3, 4]), np.zeros(2))
    assert values["novelty/bonus_mean"] == 0.0
    assert values["novelty/bonus_rows"] == 0
    assert math.isnan(values["novelty/bonus_length_corr"])

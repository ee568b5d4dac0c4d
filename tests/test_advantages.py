"""Rewards and scores -> rows: which prompt, which statistics, which weight."""

import numpy as np
import pytest

from xrpo_fast.advantages import (
    fill_advantages,
    length_residuals,
    make_rows,
    row_weights,
    sequence_scores,
    shape_advantages,
    step_rewards,
)
from xrpo_fast.config import IclConfig, LossConfig, NoveltyConfig, TreeConfig

NO_NOVELTY = NoveltyConfig(enabled=False)
NOVELTY = NoveltyConfig(enabled=True)
MAX_TOKENS = 20


def shaped_rows(rollouts, *, loss=None, novelty=NO_NOVELTY, icl=None):
    """The stages in the trainer's order; (rows, shaped)."""
    loss, icl = loss or LossConfig(), icl or IclConfig()
    rows = make_rows(rollouts, icl)
    rewards = step_rewards(rollouts, loss, MAX_TOKENS)
    shaped = shape_advantages(
        rows, rollouts, rewards, loss=loss, novelty=novelty, tree=TreeConfig()
    )
    advantages = shaped.advantages.double().numpy()
    fill_advantages(rows, rollouts, rewards, advantages, loss=loss, icl=icl)
    return rows, shaped


@pytest.fixture
def ragged(make_rollout):
    """Groups of 4, 2 and 3 rollouts: mixed, all wrong, mixed."""
    rewards = [(0, 1), (0, 0), (0, 0), (0, 0), (1, 0), (1, 0), (2, 1), (2, 1), (2, 0)]
    return [
        make_rollout(group, float(reward), sample_index=i)
        for i, (group, reward) in enumerate(rewards)
    ]


def test_group_advantages_over_ragged_groups(ragged):
    rows, _ = shaped_rows(ragged)
    for group in (0, 1, 2):
        rewards = np.array([r.verdict.reward for r in ragged if r.prompt.index == group])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        ours = [row.advantage for row in rows if row.group == group]
        np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_scale_none_and_batch(ragged):
    rewards = np.array([r.verdict.reward for r in ragged])
    means = np.array([0.25] * 4 + [0.0] * 2 + [2 / 3] * 3)
    rows, _ = shaped_rows(ragged, loss=LossConfig(scale="none"))
    np.testing.assert_allclose([row.advantage for row in rows], rewards - means, atol=1e-6)
    rows, _ = shaped_rows(ragged, loss=LossConfig(scale="batch"))
    expected = (rewards - means) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose([row.advantage for row in rows], expected, atol=1e-6)


def test_novelty_raises_rare_correct_answers_by_the_formula(make_rollout):
    logprobs = [[-2.0, -2.4], [-0.5], [-0.3, -0.3, -0.3], [-1.0]]
    rollouts = [
        make_rollout(0, reward, sample_index=i, token_ids=(7,) * len(lp), logprobs=lp)
        for i, (reward, lp) in enumerate(zip([1.0, 1.0, 0.0, 0.0], logprobs, strict=True))
    ]
    rows, shaped = shaped_rows(rollouts, novelty=NOVELTY)
    scores = np.array([-2.2, -0.5, -0.3, -1.0])
    rewards = np.array([1.0, 1.0, 0.0, 0.0])
    base = (rewards - 0.5) / (rewards.std(ddof=1) + 1e-6)
    eta = np.exp(scores - scores.mean())
    bonus = np.minimum(np.maximum(2.5 * (1 - eta), 0), 0.5 * base)
    bonus[[2, 3]] = 0.0
    np.testing.assert_allclose(shaped.eta, eta, atol=1e-6)
    np.testing.assert_allclose([row.advantage for row in rows], base + bonus, atol=1e-6)
    assert rows[0].advantage == pytest.approx(1.5 * base[0], abs=1e-6), "held at half the advantage"
    assert rows[1].advantage == pytest.approx(base[1], abs=1e-6), "more likely than its group"


def test_seeded_rows_stay_out_of_the_novelty_mean_and_bonus(make_rollout):
    def group_of(seeded_logprob: float):
        return [
            make_rollout(0, 1.0, sample_index=0, logprobs=[-1.0] * 3),
            make_rollout(0, 0.0, sample_index=1, logprobs=[-0.8] * 3),
            make_rollout(0, 1.0, sample_index=2, logprobs=[seeded_logprob] * 3, is_seeded=True),
        ]

    results = [shaped_rows(group_of(lp), novelty=NOVELTY)[1] for lp in (-0.01, -9.0)]
    np.testing.assert_array_equal(results[0].bonus, results[1].bonus)
    assert results[0].bonus[2] == 0
    assert results[0].bonus[0] > 0


@pytest.mark.parametrize(
    ("train_prompt", "is_original", "has_sampler", "is_shaped"),
    [
        ("original", True, False, False),
        ("seeded", False, True, False),
        ("original_shaped", True, False, True),
        ("baseline_only", True, False, False),
    ],
)
def test_the_prompt_that_a_seeded_row_is_trained_under(
    make_rollout, train_prompt, is_original, has_sampler, is_shaped
):
    seeded = make_rollout(0, 1.0, is_seeded=True)
    (row,) = make_rows([seeded], IclConfig(train_prompt=train_prompt))
    expected = seeded.prompt.token_ids if is_original else seeded.completion.request.prompt_ids
    assert row.prompt_ids == expected
    assert (row.sampler_logprobs is not None) == has_sampler
    assert row.is_shaped == is_shaped
    (plain,) = make_rows([make_rollout(0, 1.0)], IclConfig(train_prompt=train_prompt))
    assert plain.prompt_ids == (1, 2, 3)
    assert plain.sampler_logprobs is not None
    assert not plain.is_shaped


@pytest.mark.parametrize(
    ("train_prompt", "trained"),
    [("original", 2), ("seeded", 2), ("original_shaped", 1), ("baseline_only", 0)],
)
def test_seeded_rows_enter_the_statistics_whether_or_not_they_train(
    make_rollout, train_prompt, trained
):
    rollouts = [
        make_rollout(0, 0.0, sample_index=0),
        make_rollout(0, 0.0, sample_index=1, is_seeded=True),
        make_rollout(0, 1.0, sample_index=2, is_seeded=True),
    ]
    rows, _ = shaped_rows(rollouts, icl=IclConfig(train_prompt=train_prompt))
    assert rows[0].advantage == pytest.approx(-(1 / 3) / (np.sqrt(1 / 3) + 1e-6), abs=1e-6)
    assert sum(row.advantage != 0 for row in rows[1:]) == trained


def test_unscored_rows_have_no_weight_and_no_say(make_rollout):
    rollouts = [
        make_rollout(0, 1.0, sample_index=0),
        make_rollout(0, 0.0, sample_index=1),
        make_rollout(0, float("nan"), sample_index=2, error="timed out"),
    ]
    rows, _ = shaped_rows(rollouts)
    with_two, _ = shaped_rows(rollouts[:2])
    assert rows[2].token_weight == 0
    assert [row.advantage for row in rows[:2]] == [row.advantage for row in with_two]


def test_truncated_rows_by_option(make_rollout):
    rollouts = [
        make_rollout(0, 1.0, sample_index=0),
        make_rollout(0, 0.0, sample_index=1, finish_reason="length"),
    ]
    kept, _ = shaped_rows(rollouts, loss=LossConfig(truncated="keep"))
    masked, _ = shaped_rows(rollouts, loss=LossConfig(truncated="mask"))
    assert [row.token_weight for row in kept] == [1, 1]
    assert [row.token_weight for row in masked] == [1, 0]
    assert masked[0].advantage == kept[0].advantage


def test_overlong_penalty_falls_linearly_to_minus_one(make_rollout):
    rollouts = [make_rollout(0, 1.0, token_ids=(1,) * n) for n in (0, 15, 16, 18, 20, 25)]
    rewards = step_rewards(rollouts, LossConfig(overlong_buffer_frac=0.25), MAX_TOKENS)
    np.testing.assert_allclose(rewards, [1.0, 1.0, 0.8, 0.4, 0.0, 0.0])
    np.testing.assert_array_equal(step_rewards(rollouts, LossConfig(), MAX_TOKENS), np.ones(6))


def test_scores_come_from_the_trainer_where_it_has_them(make_rollout):
    rollouts = [
        make_rollout(0, 1.0, sample_index=0, logprobs=[-1.0, -2.0, -3.0]),
        make_rollout(0, 0.0, sample_index=1, logprobs=[-1.0, -2.0, -3.0]),
        make_rollout(0, 0.0, sample_index=2, logprobs=[-1.0, -2.0, -3.0], is_seeded=True),
        make_rollout(0, 0.0, sample_index=3, token_ids=()),
    ]
    rows = make_rows(rollouts, IclConfig())
    for row in (rows[0], rows[2]):
        row.old_logprobs = np.array([-4.0, -4.0, -4.0], np.float32)
    scores = sequence_scores(rows, rollouts, NOVELTY)
    # The seeded row's old log-probs are under the swapped prompt, not the one it was drawn from.
    np.testing.assert_array_equal(scores[:3], [-4.0, -2.0, -2.0])
    assert np.isnan(scores[3])
    sampler = sequence_scores(rows, rollouts, NoveltyConfig(enabled=True, logprobs="sampler"))
    np.testing.assert_array_equal(sampler[:3], [-2.0, -2.0, -2.0])


def test_empty_rollouts_do_not_spoil_the_group(make_rollout):
    rollouts = [
        make_rollout(0, 1.0, sample_index=0),
        make_rollout(0, 0.0, sample_index=1, token_ids=()),
        make_rollout(0, 0.0, sample_index=2),
    ]
    rows, shaped = shaped_rows(rollouts, novelty=NOVELTY)
    assert np.isfinite([row.advantage for row in rows]).all()
    assert np.isfinite(shaped.bonus.numpy()).all()


def test_length_residuals_remove_the_trend_and_nothing_else():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 500, size=200)
    noise = rng.normal(size=200) * 0.1
    scores = (-2.0 + 0.3 * np.log(lengths) + noise).astype(np.float32)
    fitted = np.ones(200, bool)
    residuals = length_residuals(scores, lengths, fitted)
    assert abs(np.corrcoef(residuals, np.log(lengths))[0, 1]) < 1e-5
    assert np.corrcoef(residuals, noise)[0, 1] > 0.99
    outlier = scores.copy()
    outlier[0] = 100.0
    fitted[0] = False
    without = length_residuals(outlier, lengths, fitted)
    np.testing.assert_allclose(without[1:], length_residuals(scores, lengths, fitted)[1:])


@pytest.mark.parametrize("lengths", [[5, 5, 5], [7]], ids=["equal-lengths", "one-row"])
def test_length_residuals_without_a_trend_to_fit(lengths):
    scores = np.arange(len(lengths), dtype=np.float32)
    fitted = np.ones(len(lengths), bool)
    np.testing.assert_array_equal(length_residuals(scores, np.array(lengths), fitted), scores)


def test_row_weights_by_hand():
    groups = [0, 0, 0, 0, 1, 1, 2, 2, 2]
    advantages = np.array([1.5, -0.5, -0.5, -0.5, 0, 0, 0.6, 0.6, -1.2])
    for group_weight, expected in {
        "rollout": [1.0] * 9,
        "prompt": [3 / 4] * 4 + [3 / 2] * 2 + [1.0] * 3,
        "effective": [1.0] * 4 + [0.0] * 2 + [1.0] * 3,
    }.items():
        weights = row_weights(groups, advantages, np.full(9, True), group_weight)
        np.testing.assert_allclose(weights, expected)


def test_prompt_weights_sum_to_the_rows_and_give_each_prompt_the_same():
    groups = np.repeat(np.arange(5), [1, 7, 2, 4, 2])
    weights = row_weights(groups, np.ones(16), np.full(16, True), "prompt")
    assert weights.sum() == pytest.approx(16)
    np.testing.assert_allclose(np.bincount(groups, weights), np.full(5, 16 / 5))
    # Rows that do not count take no weight from the others of their prompt.
    is_counted = np.full(16, True)
    is_counted[[0, 1, 2, 8]] = False
    weights = row_weights(groups, np.ones(16), is_counted, "prompt")
    np.testing.assert_allclose(np.bincount(groups, weights), [0, 3, 3, 3, 3])
    assert not weights[~is_counted].any()

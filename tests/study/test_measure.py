import math

import numpy as np
import pytest

from xrpo_fast.metrics import read_metrics
from xrpo_fast.study.measure import Cost, cost_of, measure
from xrpo_fast.study.resampling import difference, draws, estimate, mean_cost, ratio
from xrpo_fast.study.study_file import load_study


@pytest.fixture
def measured(write_study, write_run):
    """A run with accuracies .2, .4, .8 before and after two and four steps."""
    run = load_study(write_study()).runs[0]
    write_run(run, [0.2, 0.4, 0.8])
    rows = read_metrics(run.path / "metrics.jsonl")
    return measure(rows, arm="xrpo", seed=0, eval_set="heldout", targets=[0.1, 0.5, 0.9])


def test_costs_lie_on_the_line_between_evaluations(measured):
    # .5 is a quarter of the way from .4 at step 2 to .8 at step 4: step 2.5.
    assert measured.costs["steps"]["50%"] == Cost(pytest.approx(2.5), True)
    assert measured.costs["rollouts"]["50%"] == Cost(pytest.approx(2.5 * 72), True)
    # Steps generated 100, 200, 300, 400 tokens.
    assert measured.costs["tokens"]["50%"] == Cost(pytest.approx(100 + 200 + 150), True)
    assert measured.costs["seconds"]["50%"] == Cost(pytest.approx(1.25), True)


def test_a_target_met_before_training_costs_nothing(measured):
    assert measured.costs["tokens"]["10%"] == Cost(0.0, True)


def test_a_missed_target_costs_more_than_was_spent(measured):
    assert measured.costs["steps"]["90%"] == Cost(4.0, False)
    assert measured.costs["tokens"]["90%"] == Cost(1000.0, False)


def test_the_first_crossing_counts():
    steps, accuracy = np.array([0, 10, 20, 30]), np.array([0.0, 0.6, 0.3, 0.7])
    found = cost_of(0.6, steps, accuracy, np.arange(31.0))
    assert found == Cost(10.0, True)


def test_final_numbers_and_mechanisms(measured):
    assert measured.final == {
        "pass@1": 0.8,
        "pass@2": pytest.approx(0.85),
        "cons@2": pytest.approx(0.82),
        "tier/vhard": 0.4,
    }
    # Flipped in steps 1 to 4: 1, 2, 0, 1 of 4 each.
    assert measured.mechanisms["flipped"] == pytest.approx(4 / 16)
    assert measured.mechanisms["dead_groups"] == 0.25
    assert measured.mechanisms["answer_tokens"] == 11.0


def test_an_arm_without_later_rounds_has_no_share_of_flipped_prompts(write_study, write_run):
    run = load_study(write_study()).runs[0]
    write_run(run, [0.2, 0.4], icl__hopeless_prompts=0)
    rows = [row | {"icl/hopeless_prompts": 0} for row in read_metrics(run.path / "metrics.jsonl")]
    found = measure(rows, arm="a", seed=0, eval_set="heldout", targets=[0.5])
    assert "flipped" not in found.mechanisms


def test_a_run_without_a_last_evaluation_is_not_measured(write_study, write_run):
    run = load_study(write_study()).runs[0]
    write_run(run, [0.2, 0.4])
    rows = [*read_metrics(run.path / "metrics.jsonl"), {"step": 3}]
    with pytest.raises(ValueError, match=r"pass@1: expected it before the first step and after"):
        measure(rows, arm="a", seed=0, eval_set="heldout", targets=[0.5])


def test_interval_over_few_seeds_is_exact():
    assert draws(3).shape == (27, 3)
    found = estimate({0: 1.0, 1: 2.0, 2: 3.0})
    means = np.sort([np.mean(d) for d in np.array([1.0, 2.0, 3.0])[draws(3)]])
    assert found.mean == 2.0
    assert (found.low, found.high) == (means[0], means[-1])


def test_one_seed_gives_no_interval():
    found = estimate({4: 0.5})
    assert (found.mean, found.low, found.high) == (0.5, None, None)


def test_differences_are_paired():
    # Seeds differ by far more than the arms do: unpaired, the interval would hold 0.
    found = difference({0: 0.1, 1: 0.5, 2: 0.9}, {0: 0.15, 1: 0.55, 2: 0.95, 3: 0.0})
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((-0.05, -0.05, -0.05))
    assert list(found.by_seed) == [0, 1, 2]
    assert difference({0: 1.0}, {1: 1.0}) is None


def reached(*values: float) -> dict[int, Cost]:
    return {seed: Cost(value, True) for seed, value in enumerate(values)}


def test_ratio_of_reached_targets_is_a_number():
    found = ratio(reached(30, 50), reached(60, 100))
    assert found is not None
    assert found.is_exact
    assert found.least == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))


def test_ratio_is_bounded_where_a_target_was_missed():
    missed = {0: Cost(60, True), 1: Cost(100, False)}
    found = ratio(reached(30, 50), missed)
    assert found is not None
    assert (found.least, found.most) == (0.0, pytest.approx(0.5))
    turned = ratio(missed, reached(30, 50))
    assert turned is not None
    assert (turned.least, turned.most, turned.high) == (pytest.approx(2.0), None, None)
    both = ratio(missed, missed)
    assert both is not None
    assert (both.least, both.most) == (0.0, None)


def test_ratio_of_nothing_to_nothing_is_one():
    found = ratio(reached(0, 0), reached(0, 0))
    assert found is not None
    assert found.least == found.most == 1.0


def test_mean_cost_with_a_missed_target_is_a_bound():
    found = mean_cost({0: Cost(60, True), 1: Cost(100, False)})
    assert (found.mean, found.is_bound, found.high) == (80.0, True, None)
    assert not mean_cost(reached(1, 2)).is_bound
    assert math.isclose(mean_cost(reached(1, 2)).mean, 1.5)

"""pass@k and cons@k against closed forms and brute force, and the coverage of their intervals."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrpo_fast.estimators import (
    answer_classes,
    class_verdicts,
    cons_at_k,
    cons_difference,
    cons_interval,
    mean_difference,
    pass_at_k,
    pass_difference,
    pass_interval,
)


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 4, 1.0),
        (4, 0, 4, 0.0),
        (4, 2, 2, 5 / 6),
        (32, 1, 32, 1.0),
        (5, 3, 3, 1.0),
    ],
)
def test_pass_at_k_by_hand(num_samples, num_correct, k, expected):
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_closed_form():
    for n in range(1, 40):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            expected = 1 - math.comb(n - c, k) / math.comb(n, k)
            assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_large_counts_does_not_overflow():
    expected = 1 - math.comb(9990, 5000) / math.comb(10000, 5000)
    assert pass_at_k(10000, 10, 5000) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 1, 0), "k: expected 1..4 (the number of samples), got 0"),
        ((4, 1, 5), "k: expected 1..4 (the number of samples), got 5"),
        ((4, 5, 1), "num_correct: expected 0..4, got 5"),
        ((4, -1, 1), "num_correct: expected 0..4, got -1"),
    ],
)
def test_pass_at_k_refuses(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pass_at_k(*arguments)


def majority_value(answers, correct, ties):
    """Value of one vote, by the definition: the most frequent answer among those that parsed."""
    parsed = [a for a in answers if a is not None]
    if not parsed:
        return 0.0
    counts = {a: parsed.count(a) for a in parsed}
    top = [a for a in counts if counts[a] == max(counts.values())]
    if ties == "first":
        top = [next(a for a in parsed if a in top)]
    right = {a for a, c in zip(answers, correct, strict=True) if c}
    return sum(a in right for a in top) / len(top)


@pytest.mark.parametrize(
    ("answers", "right", "expected", "first"),
    [
        (["4", "4", "5"], "4", 1.0, 1.0),
        (["5", "4", "4", "5"], "4", 0.5, 0.0),
        (["4", "5", "4", "5"], "4", 0.5, 1.0),
        (["1", "2", "3"], "3", 1 / 3, 0.0),
        ([None, None, "4"], "4", 1.0, 1.0),
        ([None, None, None], "4", 0.0, 0.0),
        (["5", None, "4", None], "4", 0.5, 0.0),
        (["4"], "4", 1.0, 1.0),
    ],
    ids=[
        "majority",
        "tie-wrong-first",
        "tie-right-first",
        "three-way-tie",
        "unparsable-have-no-vote",
        "all-unparsable",
        "tie-beside-unparsable",
        "one",
    ],
)
def test_cons_of_all_samples(answers, right, expected, first):
    correct = [a == right for a in answers]
    k = len(answers)
    assert cons_at_k(answers, correct, k) == pytest.approx(expected)
    assert cons_at_k(answers, correct, k, ties="first") == pytest.approx(first)


answer_lists = st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(answers=answer_lists, right=st.sampled_from(["1", "2"]), order=st.randoms())
def test_cons_does_not_depend_on_the_order_of_samples(answers, right, order):
    shuffled = list(answers)
    order.shuffle(shuffled)
    values = [
        cons_at_k(each, [a == right for a in each], len(each)) for each in (answers, shuffled)
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    answers=answer_lists,
    right=st.sampled_from(["1", "2"]),
    ties=st.sampled_from(["expected", "first"]),
)
def test_cons_equals_the_definition(answers, right, ties):
    correct = [a == right for a in answers]
    value = cons_at_k(answers, correct, len(answers), ties=ties)
    assert value == pytest.approx(majority_value(answers, correct, ties), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_cons_of_fewer_than_all_is_the_mean_over_subsets(k):
    answers = ["a", "b", "a", None, "c", "b", "b"]
    correct = [a == "a" for a in answers]
    subsets = list(itertools.combinations(range(len(answers)), k))
    values = [
        majority_value([answers[i] for i in s], [correct[i] for i in s], "expected")
        for s in subsets
    ]
    # A class is right where any of the n samples says so, and all equal answers agree here.
    exact, spread = np.mean(values), np.std(values)
    num_subsets = 20000
    value = cons_at_k(answers, correct, k, num_subsets=num_subsets)
    assert abs(value - exact) < 5 * spread / math.sqrt(num_subsets) + 1e-12


def test_cons_subsets_are_seeded():
    answers, correct = ["a", "b", "b", "c", "a"], [True, False, False, False, True]
    values = [cons_at_k(answers, correct, 3, num_subsets=50, seed=seed) for seed in (0, 0, 1)]
    assert values[0] == values[1]
    assert values[0] != values[2]


def numerically_equal(a: str, b: str) -> bool:
    return abs(float(a) - float(b)) <= 0.15


def test_equivalent_answers_vote_together():
    answers = ["0.5", ".50", "3", "3", "0.500"]
    correct = [True, True, False, False, True]
    assert cons_at_k(answers, correct, 5) == 0.0, "as strings, 3 has the most votes"
    assert cons_at_k(answers, correct, 5, equivalent=numerically_equal) == 1.0


def test_merging_is_transitive():
    assert answer_classes(["1.0", "1.1", "1.2", "9"], numerically_equal).tolist() == [0, 0, 0, 1]
    assert not numerically_equal("1.0", "1.2")


def test_equivalence_in_either_direction_merges():
    def one_way(a: str, b: str) -> bool:
        return (a, b) == ("later", "earlier")

    assert answer_classes(["earlier", "later"], one_way).tolist() == [0, 0]


def test_late_bridge_merges_classes_that_were_apart():
    pairs = {("a", "c"), ("b", "c")}
    joined = answer_classes(["a", "b", "d", "c", None], lambda x, y: (x, y) in pairs)
    assert joined.tolist() == [0, 0, 1, 0, -1]


def test_a_class_is_right_where_one_member_was_accepted():
    classes = np.array([0, 1, 0, -1])
    assert class_verdicts(classes, [False, False, True, True]).tolist() == [True, False]
    assert class_verdicts(np.array([-1, -1]), [True, False]).tolist() == []


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((["a"], [True], 2), {}, "k: expected 1..1 (the number of samples), got 2"),
        ((["a"], [True, False], 1), {}, "correct: expected one per answer = 1, got 2"),
        ((["a"], [True], 1), {"ties": "last"}, "ties: expected 'expected' or 'first', got 'last'"),
        (([], [], 1), {}, "k: expected 1..0"),
        (([None], [False], 1), {"num_subsets": 0}, "num_subsets: expected >= 1, got 0"),
    ],
)
def test_cons_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cons_at_k(*arguments, **options)


def test_pass_interval_point_is_the_mean_of_pass_at_k():
    n, c = np.array([4, 8, 8]), np.array([1, 0, 5])
    for k in (1, 3, 4):
        interval = pass_interval(n, c, k, seed=0)
        expected = np.mean([pass_at_k(int(a), int(b), k) for a, b in zip(n, c, strict=True)])
        assert interval.mean == pytest.approx(expected)
        assert interval.low <= interval.mean <= interval.high
        assert interval.low >= 0
        assert interval.high <= 1


def test_intervals_are_seeded_and_shrink_with_questions():
    few = pass_interval(np.full(10, 8), np.tile([2, 6], 5), 1, seed=0)
    many = pass_interval(np.full(1000, 8), np.tile([2, 6], 500), 1, seed=0)
    assert few == pass_interval(np.full(10, 8), np.tile([2, 6], 5), 1, seed=0)
    assert few != pass_interval(np.full(10, 8), np.tile([2, 6], 5), 1, seed=1)
    assert many.high - many.low < (few.high - few.low) / 5


def test_all_right_and_all_wrong_have_no_width():
    assert pass_interval(np.full(5, 4), np.full(5, 4), 2, seed=0).low == 1.0
    assert pass_interval(np.full(5, 4), np.zeros(5, int), 2, seed=0).high == 0.0


NUM_TRIALS = 40
MIN_COVERAGE = 0.95 - 3 * math.sqrt(0.95 * 0.05 / NUM_TRIALS)
"""Three standard errors of the share of hits below the nominal one."""


@pytest.mark.parametrize(("k", "num_questions"), [(1, 40), (4, 40), (8, 40), (8, 500)])
def test_pass_intervals_cover_the_truth(k, num_questions):
    """Questions of hidden difficulty p ~ Beta(0.5, 0.5): a 95 % interval holds E[1 - (1-p)^k]."""
    rng = np.random.default_rng(k)
    a, b, num_samples = 0.5, 0.5, 8
    truth = 1 - math.exp(
        math.lgamma(b + k) + math.lgamma(a + b) - math.lgamma(b) - math.lgamma(a + b + k)
    )
    hits = 0
    for trial in range(NUM_TRIALS):
        correct = rng.binomial(num_samples, rng.beta(a, b, size=num_questions))
        interval = pass_interval(np.full(num_questions, num_samples), correct, k, seed=trial)
        assert interval.low <= interval.mean <= interval.high
        hits += interval.low <= truth <= interval.high
    assert hits / NUM_TRIALS >= MIN_COVERAGE


@pytest.mark.parametrize("k", [2, 8])
def test_cons_intervals_cover_the_truth(k):
    """Three answers with hidden chances per question; the truth is that of 2,000 questions."""
    rng = np.random.default_rng(k)
    num_samples = 8

    def draw(num_questions: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], float]:
        """Votes on questions whose first answer is the right one, and cons@k."""
        chances = rng.dirichlet([1.0, 0.8, 0.5], size=num_questions)
        picks = [rng.choice(3, size=num_samples, p=p) for p in chances]
        answers = [[str(i) for i in row] for row in picks]
        correct = [[a == "0" for a in row] for row in answers]
        point = np.mean(
            [
                cons_at_k(row, is_right, k, num_subsets=20, seed=i)
                for i, (row, is_right) in enumerate(zip(answers, correct, strict=True))
            ]
        )
        classes = [answer_classes(row) for row in answers]
        verdicts = [class_verdicts(c, v) for c, v in zip(classes, correct, strict=True)]
        return list(zip(classes, verdicts, strict=True)), float(point)

    _, truth = draw(2000)
    hits = 0
    for trial in range(NUM_TRIALS):
        votes, point = draw(40)
        interval = cons_interval(votes, k, point, seed=trial)
        assert interval.low <= point <= interval.high
        hits += interval.low <= truth <= interval.high
    assert hits / NUM_TRIALS >= MIN_COVERAGE


def test_difference_of_a_run_and_itself_is_zero_within_its_interval():
    counts = (np.full(30, 8), np.tile([0, 3, 8], 10))
    interval = pass_difference(counts, counts, 4, seed=0)
    assert interval.mean == 0.0
    assert interval.low < 0.0 < interval.high


def test_pairing_takes_the_spread_of_the_questions_out():
    """Questions from hopeless to easy, ours better by one in a hundred on each."""
    solved = np.arange(0, 1000, 10)
    ours, theirs = (np.full(100, 1000), solved + 10), (np.full(100, 1000), solved)
    paired = pass_difference(ours, theirs, 1, seed=0)
    alone = pass_interval(*ours, 1, seed=0)
    assert paired.mean == pytest.approx(0.01)
    assert 0 < paired.low < paired.mean < paired.high
    assert paired.high - paired.low < (alone.high - alone.low) / 10


@pytest.mark.parametrize("k", [1, 8])
def test_pass_differences_cover_the_truth(k):
    """Both runs have the same hidden difficulties, so that the true difference is zero."""
    rng = np.random.default_rng(10 + k)
    hits = 0
    for trial in range(NUM_TRIALS):
        chances = rng.beta(0.5, 0.5, size=60)
        ours, theirs = ((np.full(60, 8), rng.binomial(8, chances)) for _ in range(2))
        interval = pass_difference(ours, theirs, k, seed=trial)
        assert interval.low <= interval.mean <= interval.high
        hits += interval.low <= 0 <= interval.high
    assert hits / NUM_TRIALS >= MIN_COVERAGE


def test_differences_change_sign_with_the_sides():
    ours = [(np.array([0, 0, 1, 1]), np.array([True, False]))] * 40
    theirs = [(np.array([0, 1, 1, 1]), np.array([True, False]))] * 40
    forward = cons_difference(ours, theirs, 4, 0.5, seed=0)
    assert forward.mean == 0.5
    assert forward.low > 0
    backward = cons_difference(theirs, ours, 4, -0.5, seed=0)
    assert backward.high < 0


def test_mean_difference_by_hand():
    lengths, others = np.array([10.0, 20.0, 30.0]), np.array([8.0, 18.0, 28.0])
    interval = mean_difference(lengths, others, seed=0)
    assert (interval.mean, interval.low, interval.high) == (2.0, 2.0, 2.0)

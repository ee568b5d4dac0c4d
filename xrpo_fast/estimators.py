"""pass@k, cons@k and avg@k of graded samples, with bootstrap intervals.

Q questions, n samples of each, c of them correct. Intervals resample questions and, within each
question, samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

NUM_BOOTSTRAP = 1000

Votes = Sequence[tuple[np.ndarray, np.ndarray]]
"""Per question: (n,) class of each sample's answer, -1 = unparsable; (C,) whether it is right."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over questions with its bootstrap interval (95 %)."""

    mean: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that at least one of k samples is correct.

        pass@k = 1 - C(n-c, k) / C(n, k) = 1 - prod_{i=n-c+1..n} (1 - k/i)

    Raises:
        ValueError: k < 1, k > num_samples, or num_correct outside 0..num_samples.
    Source: arXiv:2107.03374.
    """
    _check_k(k, num_samples)
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct: expected 0..{num_samples}, got {num_correct}")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


def cons_at_k(
    answers: Sequence[str | None],
    correct: Sequence[bool],
    k: int,
    *,
    ties: Literal["expected", "first"] = "expected",
    num_subsets: int = 1000,
    seed: int = 0,
    equivalent: Callable[[str, str], bool] | None = None,
) -> float:
    """Probability that the majority answer of k samples is correct (maj@k).

    Args:
        answers: final answers in canonical form; None = unparsable, which has no vote.
        correct: verdict of each sample.
        ties: expected = mean over the tied answers; first = the one that came first.
        num_subsets: seeded subsets without replacement, averaged where k < len(answers); >= 1.
        equivalent: merges answers that are equal in either direction; merging is transitive.
            None: equal strings.
    Returns:
        In [0, 1]; 0 where no sample could be parsed.
    Raises:
        ValueError: k < 1 or k > len(answers); lengths differ; unknown ties; num_subsets < 1.
    """
    _check_k(k, len(answers))
    if len(correct) != len(answers):
        raise ValueError(f"correct: expected one per answer = {len(answers)}, got {len(correct)}")
    if ties not in ("expected", "first"):
        raise ValueError(f"ties: expected 'expected' or 'first', got {ties!r}")
    if num_subsets < 1:
        raise ValueError(f"num_subsets: expected >= 1, got {num_subsets}")
    classes = answer_classes(answers, equivalent)
    is_right = class_verdicts(classes, correct)
    num = len(answers)
    if k == num:
        votes = np.arange(num)[None]
    else:
        rng = np.random.default_rng(seed)
        votes = rng.permuted(np.tile(np.arange(num), (num_subsets, 1)), axis=1)[:, :k]
    return float(_vote_values(classes[votes], is_right, ties).mean())


def answer_classes(
    answers: Sequence[str | None], equivalent: Callable[[str, str], bool] | None = None
) -> np.ndarray:
    """(n,) int class of each answer, numbered by first appearance; -1 = unparsable."""
    distinct = list(dict.fromkeys(answer for answer in answers if answer is not None))
    parent = list(range(len(distinct)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    if equivalent is not None:
        for j in range(len(distinct)):
            for i in range(j):
                if root(i) != root(j) and (
                    equivalent(distinct[i], distinct[j]) or equivalent(distinct[j], distinct[i])
                ):
                    low, high = sorted((root(i), root(j)))
                    parent[high] = low
    numbers: dict[int, int] = {}
    of_answer = {a: numbers.setdefault(root(i), len(numbers)) for i, a in enumerate(distinct)}
    return np.array([-1 if a is None else of_answer[a] for a in answers], dtype=np.int64)


def class_verdicts(classes: np.ndarray, correct: Sequence[bool]) -> np.ndarray:
    """(C,) bool: a class is right where the grader accepted one of its members."""
    verdicts = np.zeros(classes.max(initial=-1) + 1, dtype=bool)
    for number, is_correct in zip(classes, correct, strict=True):
        if number >= 0:
            verdicts[number] |= bool(is_correct)
    return verdicts


def _vote_values(voters: np.ndarray, is_right: np.ndarray, ties: str) -> np.ndarray:
    """(B,) value of B votes, given the classes of their voters (B, k)."""
    if not len(is_right):
        return np.zeros(len(voters))
    votes = voters[:, :, None] == np.arange(len(is_right))
    counts = votes.sum(axis=1)
    is_top = (counts == counts.max(axis=1, keepdims=True)) & (counts > 0)
    num_top = is_top.sum(axis=1)
    if ties == "expected":
        return (is_top & is_right).sum(axis=1) / np.maximum(num_top, 1)
    first = votes.argmax(axis=1)
    chosen = np.where(is_top, first, voters.shape[1]).argmin(axis=1)
    return np.where(num_top > 0, is_right[chosen], False).astype(float)


def pass_interval(num_samples: np.ndarray, num_correct: np.ndarray, k: int, seed: int) -> Interval:
    """pass@k over questions (Q,), with its interval."""
    rng = np.random.default_rng(seed)
    points, values = _pass_replicates(num_samples, num_correct, k, rng)
    return _interval(float(points.mean()), values, rng)


def pass_difference(
    ours: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray], k: int, seed: int
) -> Interval:
    """Our pass@k minus theirs, paired: a replicate draws the same questions for both.

    Args:
        ours, theirs: (num_samples, num_correct), each (Q,), over the same questions.
    """
    rng = np.random.default_rng(seed)
    points, values = _pass_replicates(*ours, k, rng)
    other_points, other_values = _pass_replicates(*theirs, k, rng)
    return _interval(float((points - other_points).mean()), values - other_values, rng, low=-1.0)


def cons_interval(votes: Votes, k: int, point: float, seed: int) -> Interval:
    """Interval of cons@k, whose estimate is `point`."""
    rng = np.random.default_rng(seed)
    return _interval(point, _cons_replicates(votes, k, rng), rng)


def cons_difference(ours: Votes, theirs: Votes, k: int, point: float, seed: int) -> Interval:
    """Our cons@k minus theirs, whose estimate is `point`, paired as in pass_difference."""
    rng = np.random.default_rng(seed)
    values = _cons_replicates(ours, k, rng) - _cons_replicates(theirs, k, rng)
    return _interval(point, values, rng, low=-1.0)


def mean_difference(ours: np.ndarray, theirs: np.ndarray, seed: int) -> Interval:
    """Mean of ours minus theirs, one number per question (Q,), paired."""
    rng = np.random.default_rng(seed)
    gaps = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    values = np.broadcast_to(gaps, (NUM_BOOTSTRAP, len(gaps)))
    return _interval(float(gaps.mean()), values, rng, low=-np.inf, high=np.inf)


def _pass_replicates(
    num_samples: np.ndarray, num_correct: np.ndarray, k: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """pass@k of each question (Q,), and of its resampled samples (replicates, Q)."""
    samples = np.asarray(num_samples)
    # Sampling n verdicts with replacement, c of n of them correct, is a binomial draw.
    draws = rng.binomial(samples, num_correct / samples, size=(NUM_BOOTSTRAP, len(samples)))
    values = np.empty(draws.shape)
    points = np.empty(len(samples))
    for n in np.unique(samples):
        by_count = np.array([pass_at_k(int(n), c, k) for c in range(n + 1)])
        columns = samples == n
        values[:, columns] = by_count[draws[:, columns]]
        points[columns] = by_count[np.asarray(num_correct)[columns]]
    return points, values


def _cons_replicates(votes: Votes, k: int, rng: np.random.Generator) -> np.ndarray:
    """cons@k of resampled samples (replicates, Q): every question votes again, its voters drawn
    with replacement from its samples, as often as n samples hold k voters."""
    values = np.empty((NUM_BOOTSTRAP, len(votes)))
    for q, (numbers, is_right) in enumerate(votes):
        num_votes = len(numbers) // k
        picks = rng.integers(len(numbers), size=(NUM_BOOTSTRAP * num_votes, k))
        worth = _vote_values(numbers[picks], is_right, "expected")
        values[:, q] = worth.reshape(NUM_BOOTSTRAP, num_votes).mean(axis=1)
    return values


def _interval(
    mean: float, values: np.ndarray, rng: np.random.Generator, low: float = 0.0, high: float = 1.0
) -> Interval:
    """95 % of the means of resampled questions; values is (replicates, Q), within low..high."""
    num_replicates, num_questions = values.shape
    picks = rng.integers(num_questions, size=(num_replicates, num_questions))
    means = np.take_along_axis(values, picks, axis=1).mean(axis=1)
    # Samples drawn with replacement repeat, so that the best of k, or a vote, is worth less in a
    # replicate than in fresh samples: without this shift, pass@8 of 8 samples and 500 questions
    # lies outside its own interval.
    bounds = np.quantile(means + (mean - means.mean()), [0.025, 0.975]).clip(low, high)
    return Interval(mean, float(bounds[0]), float(bounds[1]))


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k: expected 1..{num_samples} (the number of samples), got {k}")

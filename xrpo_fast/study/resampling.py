"""Means, paired differences and ratios over seeds, with bootstrap intervals (95 %).

S seeds are drawn with replacement; all arms meet the same draw, so that what a seed makes hard for
all of them cancels. Up to five seeds every possible draw is taken once, so nothing is random. With
few seeds such intervals are too narrow: two or three give no more than their range.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xrpo_fast.study.measure import Cost

MOST_SEEDS_TO_ENUMERATE = 5
NUM_DRAWS = 10_000
QUANTILE = "inverted_cdf"
"""Takes a draw as it is: few seeds give few different means, and some bounds are infinite."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds. No interval (None) from one seed alone."""

    mean: float
    low: float | None
    high: float | None
    by_seed: dict[int, float]


@dataclass(frozen=True, slots=True)
class MeanCost:
    """Mean cost over seeds; a lower bound where a seed never reached the target."""

    mean: float
    is_bound: bool
    low: float | None
    high: float | None
    """None: the interval is open upwards."""
    by_seed: dict[int, Cost]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two mean costs over the same seeds, known up to bounds where a target was missed.

    least = most where every run reached the target; most is None where it can be any number.
    """

    least: float
    most: float | None
    low: float | None
    high: float | None
    num_seeds: int

    @property
    def is_exact(self) -> bool:
        return self.most is not None and math.isclose(self.least, self.most)


def estimate(by_seed: Mapping[int, float]) -> Estimate:
    """Mean over seeds with its interval."""
    values = np.array(list(by_seed.values()), dtype=np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, None, None, dict(by_seed))
    low, high = _quantiles(values[draws(len(values))].mean(axis=1))
    return Estimate(mean, low, high, dict(by_seed))


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Ours minus theirs, paired by seed; None where no seed has both."""
    shared = [seed for seed in ours if seed in theirs]
    return estimate({seed: ours[seed] - theirs[seed] for seed in shared}) if shared else None


def mean_cost(by_seed: Mapping[int, Cost]) -> MeanCost:
    """Mean over seeds; what was spent in vain counts as a lower bound."""
    found = estimate({seed: cost.value for seed, cost in by_seed.items()})
    is_bound = not all(cost.is_reached for cost in by_seed.values())
    high = None if is_bound else found.high
    return MeanCost(found.mean, is_bound, found.low, high, dict(by_seed))


def ratio(ours: Mapping[int, Cost], theirs: Mapping[int, Cost]) -> Ratio | None:
    """Mean cost of ours : theirs over the seeds that both have; None where there is none.

    A cost that was not reached lies anywhere from what was spent to infinity, and so the ratio
    between bounds. The interval holds the draws' bounds, so it is at least as wide.
    """
    shared = [seed for seed in ours if seed in theirs]
    if not shared:
        return None
    picks = draws(len(shared))
    least, lows = _ratio_of_sums([ours[s] for s in shared], [theirs[s] for s in shared], picks)
    inverse_most, highs = _ratio_of_sums(
        [theirs[s] for s in shared], [ours[s] for s in shared], picks
    )
    most = _inverse(inverse_most)
    if len(shared) < 2:
        return Ratio(least, most, None, None, 1)
    low, inverse_high = (np.quantile(v, 0.025, method=QUANTILE).item() for v in (lows, highs))
    return Ratio(least, most, low, _inverse(inverse_high), len(shared))


def draws(num_seeds: int) -> np.ndarray:
    """(draws, num_seeds) positions of seeds drawn with replacement."""
    if num_seeds <= MOST_SEEDS_TO_ENUMERATE:
        return np.array(list(itertools.product(range(num_seeds), repeat=num_seeds)))
    return np.random.default_rng(0).integers(num_seeds, size=(NUM_DRAWS, num_seeds))


def _ratio_of_sums(
    ours: Sequence[Cost], theirs: Sequence[Cost], picks: np.ndarray
) -> tuple[float, np.ndarray]:
    """Least possible ours : theirs, of all seeds and of each draw: what ours spent at least, by
    what theirs cost at most."""
    spent = np.array([cost.value for cost in ours])
    most = np.array([cost.value if cost.is_reached else math.inf for cost in theirs])
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = spent.sum() / most.sum()
        each = spent[picks].sum(axis=1) / most[picks].sum(axis=1)
    # 0 : 0 where both were there before training: they are equal.
    return float(np.nan_to_num(whole, nan=1.0, posinf=math.inf)), np.nan_to_num(
        each, nan=1.0, posinf=math.inf
    )


def _inverse(value: float) -> float | None:
    """1 / value; None for infinity."""
    return None if value == 0 else 1 / value


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975], method=QUANTILE)
    return float(low), float(high)

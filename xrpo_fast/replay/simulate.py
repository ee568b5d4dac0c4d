"""One planner over a list of steps: what it would have rolled out, and what that is worth.

P prompts of a step, n rollouts of a prompt, p its pass rate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.replay.worlds import Draws, Step, WorldError, uniforms

METRICS = {
    "groups_with_signal": "groups with signal",
    "sum_np1p": "sum n p(1-p)",
    "mse_e3": "MSE x1e3",
    "hard_solved_frac": "hard solved once",
    "rollouts": "rollouts",
    "tokens": "tokens",
}
"""Per step: groups whose rewards differ; gradient signal; mean over prompts of the squared error of
the mean reward; share of hard prompts solved at least once; what was spent."""

PLANNERS: dict[str, dict[str, Any]] = {
    "paper": {"allocation": "proportional"},
    "greedy": {"allocation": "greedy"},
    "jeffreys": {"allocation": "proportional", "std": "jeffreys"},
    "pooled": {"allocation": "proportional", "std": "pooled"},
    "relative": {"allocation": "proportional", "exploration_mode": "relative"},
    "history": {"allocation": "greedy", "history": True},
    "uniform": {"allocation": "uniform"},
    "dapo": {"allocation": "dapo"},
    "neyman": {},
}
"""Options of each rule; "neyman" is the oracle: counts by the true sqrt(p(1-p))."""

USES_EXPLORATION = ("paper", "greedy", "jeffreys", "pooled")
BINARY = ("jeffreys", "history")


@dataclass(frozen=True, slots=True)
class Rule:
    """A planner under test."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    is_seeded: bool = True
    """Hopeless prompts draw from their seeded rollouts after the base, where there are any."""

    def planner(
        self, steps: Sequence[Step], *, base_rollouts: int | None, seed: int
    ) -> RolloutPlanner:
        """One planner for all steps; the base is half their mean budget where none is given."""
        first = steps[0]
        num_prompts = sum(len(step.prompt_ids) for step in steps)
        mean = sum(step.total_rollouts for step in steps) // num_prompts
        base = mean if self.name == "dapo" else base_rollouts or max(2, mean // 2)
        options: dict[str, Any] = {"base_rollouts": base} | PLANNERS[self.name] | self.options
        return RolloutPlanner(
            len(first.prompt_ids),
            total_rollouts=first.total_rollouts,
            seed=seed,
            **options,
        )


def neyman_counts(pass_rate: np.ndarray, total: int, least: int = 2) -> np.ndarray:
    """(P,) counts by sqrt(p(1-p)) over `least` each, largest remainder: least MSE for known p."""
    weights = np.sqrt(pass_rate * (1.0 - pass_rate))
    if weights.sum() == 0:
        weights = np.ones_like(weights)
    rest = total - least * len(weights)
    exact = rest * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: rest - counts.sum()]] += 1
    return counts + least


@dataclass(slots=True)
class _Tally:
    """What a step's rollouts came to, by prompt."""

    step: Step
    seed: int
    num: np.ndarray = field(init=False)
    num_scored: np.ndarray = field(init=False)
    num_solved: np.ndarray = field(init=False)
    reward_sum: np.ndarray = field(init=False)
    smallest: np.ndarray = field(init=False)
    largest: np.ndarray = field(init=False)
    tokens: int = 0

    def __post_init__(self) -> None:
        num_prompts = len(self.step.prompt_ids)
        self.num = np.zeros(num_prompts, np.int64)
        self.num_scored = np.zeros(num_prompts, np.int64)
        self.num_solved = np.zeros(num_prompts, np.int64)
        self.reward_sum = np.zeros(num_prompts)
        self.smallest = np.full(num_prompts, np.inf)
        self.largest = np.full(num_prompts, -np.inf)

    def roll(self, counts: np.ndarray, *, may_seed: bool) -> tuple[np.ndarray, np.ndarray, Draws]:
        """Rolls out `counts`: (R,) prompts, (R,) whether seeded, and the rollouts."""
        prompts = np.repeat(np.arange(len(counts)), counts)
        samples = np.arange(len(prompts)) - np.repeat(np.cumsum(counts) - counts, counts)
        luck = uniforms(self.seed, prompts, self.num[prompts] + samples)
        is_hopeless = (self.num > 0) & (self.num_solved == 0) & self.step.can_be_seeded
        is_seeded = is_hopeless[prompts] & may_seed
        draws = self.step.draw(prompts, is_seeded, luck)
        is_scored = ~np.isnan(draws.rewards)
        scored, rewards = prompts[is_scored], draws.rewards[is_scored]
        size = len(counts)
        self.num += counts
        self.num_scored += np.bincount(scored, minlength=size)
        self.num_solved += np.bincount(prompts[draws.solved], minlength=size)
        self.reward_sum += np.bincount(scored, rewards, minlength=size)
        np.minimum.at(self.smallest, scored, rewards)
        np.maximum.at(self.largest, scored, rewards)
        self.tokens += int(draws.num_tokens.sum())
        return prompts, is_seeded, draws

    def metrics(self) -> list[float]:
        """In the order of METRICS; NaN where a step has no such prompt."""
        p, is_hard = self.step.pass_rate, self.step.is_hard
        known = (self.num_scored > 0) & ~np.isnan(self.step.mean_reward)
        error = self.reward_sum[known] / self.num_scored[known] - self.step.mean_reward[known]
        return [
            float((self.largest > self.smallest).sum()),
            float((self.num * p * (1.0 - p)).sum()),
            1e3 * float(np.mean(error**2)) if known.any() else np.nan,
            float(np.mean(self.num_solved[is_hard] > 0)) if is_hard.any() else np.nan,
            float(self.num.sum()),
            float(self.tokens),
        ]


def simulate(
    rule: Rule,
    steps: Sequence[Step],
    *,
    seed: int,
    base_rollouts: int | None = None,
    priors: dict[str, tuple[float, float]] | None = None,
) -> np.ndarray:
    """(len(steps), len(METRICS)) of one run over the steps, in order.

    Args:
        base_rollouts: None: half the mean budget, at least 2.
        priors: history that the planner starts with; it keeps its own from step to step.
    Raises:
        WorldError: the steps' budgets and the planner's base contradict each other.
    """
    tallies = [_Tally(step, seed=seed * 1_000_003 + i) for i, step in enumerate(steps)]
    if rule.name == "neyman":
        for tally in tallies:
            counts = neyman_counts(tally.step.pass_rate, tally.step.total_rollouts)
            tally.roll(counts, may_seed=False)
        return np.array([tally.metrics() for tally in tallies])
    try:
        planner = rule.planner(steps, base_rollouts=base_rollouts, seed=seed)
        planner.priors = dict(priors or {})
        for index, tally in enumerate(tallies):
            planner.begin_step(tally.step.prompt_ids, index, tally.step.total_rollouts)
            _run_step(rule, planner, tally)
    except ValueError as error:
        raise WorldError(f"{rule.label}: {error}") from error
    return np.array([tally.metrics() for tally in tallies])


def _run_step(rule: Rule, planner: RolloutPlanner, tally: _Tally) -> None:
    while not planner.is_done:
        prompts, is_seeded, draws = tally.roll(planner.plan_round(), may_seed=rule.is_seeded)
        rewards = draws.solved.astype(np.float64) if rule.name in BINARY else draws.rewards
        planner.observe(prompts, rewards, is_seeded)


Progress = Callable[[], None]


def bootstrap(
    rule: Rule,
    steps: Sequence[Step],
    *,
    num_replicates: int,
    seed: int,
    base_rollouts: int | None = None,
    progress: Progress = lambda: None,
) -> dict[str, tuple[float, float, float]]:
    """Mean over steps of each metric with its 95 % interval, over rollouts and steps."""
    rng = np.random.default_rng(seed)
    means = np.empty((num_replicates, len(METRICS)))
    centre = np.empty_like(means)
    for replicate in range(num_replicates):
        rows = simulate(rule, steps, seed=seed + replicate, base_rollouts=base_rollouts)
        chosen = rng.integers(len(steps), size=len(steps))
        centre[replicate] = _mean(rows)
        means[replicate] = _mean(rows[chosen])
        progress()
    return summary(centre, means)


def summary(centre: np.ndarray, spread: np.ndarray) -> dict[str, tuple[float, float, float]]:
    """Per metric: mean of `centre`, 2.5 % and 97.5 % quantiles of `spread`, over the first axis."""
    result = {}
    for column, name in enumerate(METRICS):
        values = spread[:, column][~np.isnan(spread[:, column])]
        if len(values) == 0:
            result[name] = (np.nan, np.nan, np.nan)
            continue
        low, high = np.quantile(values, [0.025, 0.975])
        result[name] = (float(_mean(centre[:, column])), float(low), float(high))
    return result


def _mean(rows: np.ndarray) -> np.ndarray:
    """Mean over the first axis, NaN left out; NaN where nothing is left."""
    is_known = ~np.isnan(rows)
    total = np.where(is_known, rows, 0.0).sum(axis=0)
    count = is_known.sum(axis=0)
    return np.divide(total, count, out=np.full_like(total, np.nan, dtype=float), where=count > 0)

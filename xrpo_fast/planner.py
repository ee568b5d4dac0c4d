"""Who deserves the next rollouts: the thin Python face of csrc/planner.

For a prompt with n rollouts so far in this step and sample standard deviation s of its rewards:

    h(n) = t_{1-alpha/2, n-1} s / sqrt(n)          half-width of the Student-t interval
    Pi   = h(n) - h(n+1) + lambda sqrt(log(1+T)/n) expected uncertainty reduction + exploration

Dimensions: P prompts of the step.
Source: XRPO, arXiv 2510.06672. Where it is silent (T, lambda, alpha, rounds) we chose, by option.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

try:
    from xrpo_fast import _native
except ImportError as error:
    raise ImportError(
        "xrpo_fast._native: expected the compiled extension, got none; build it: pip install -e ."
    ) from error

Allocation = Literal["proportional", "greedy", "streaming", "uniform", "dapo"]
Std = Literal["sample", "jeffreys", "pooled"]
ExplorationMode = Literal["absolute", "relative"]
GlobalRollouts = Literal["step", "run", "train_step"]

PRIOR_COUNT = 0.5
"""a0 = b0 of the Beta prior (Jeffreys)."""
HISTORY_DECAY = 0.8
"""Weight of earlier visits to a prompt against its last one."""
MAX_REWARD = 1e100
"""Larger rewards would overflow the sums of squares."""
MAX_TOTAL = 2**31 - 1

STATE_VERSION = 1


def student_t_quantile(p: ArrayLike, df: ArrayLike) -> np.ndarray | float:
    """Quantile of Student's t: the t with P(X <= t) = p.

    Args:
        p:  probabilities in (0, 1), float64, any shape.
        df: degrees of freedom, finite, >= 1, need not be whole; broadcast against p.
    Returns:
        float64 of the broadcast shape; a float where both are scalars.
    Raises:
        ValueError: p outside (0, 1) or df below 1.
    Notes:
        Relative error below 1e-12 at the given double p; the same bits on every machine.
    """
    p_array, df_array = np.broadcast_arrays(np.asarray(p, np.float64), np.asarray(df, np.float64))
    is_inside = (p_array > 0) & (p_array < 1)
    if not is_inside.all():
        raise ValueError(f"p: expected 0 < p < 1, got {p_array[~is_inside].flat[0]}")
    is_valid = (df_array >= 1) & np.isfinite(df_array)
    if not is_valid.all():
        raise ValueError(f"df: expected a finite df >= 1, got {df_array[~is_valid].flat[0]}")
    values = _native.student_t_quantile(p_array.ravel(), df_array.ravel()).reshape(p_array.shape)
    return float(values) if values.ndim == 0 else values


class RolloutPlanner:
    """Plans the rollouts of each step, in phases (`plan_round`) or one at a time (`next_prompt`).

    Args:
        num_prompts: P of a full step.
        total_rollouts: rollouts of a full step, met exactly (except by "dapo").
        base_rollouts: rollouts of each prompt before the planner decides; "dapo": the group size;
            "uniform": of no effect.
        rounds: phases after the base; each shares an equal part of the rest. With "dapo": refills.
        exploration: lambda.
        confidence: 1 - alpha of the two-sided Student-t interval.
        allocation: "proportional" shares a round by Pi, largest remainder; "greedy" gives one at
            a time to the largest Pi; "streaming" the same whenever a slot frees; "uniform" equal
            counts in one phase; "dapo" groups of the base size until P / (rounds + 1) of them carry
            signal, refilled from the prompts of the step not used yet.
        max_rollouts_per_prompt: cap; the surplus is shared among the others by the same rule.
        std: "sample" (ddof 1); "jeffreys" sqrt(p(1-p)), p = (wins + 1/2)/(n + 1), rewards 0 or 1;
            "pooled" s^2 = (2 mean(s^2) + (n-1) s^2)/(n+1).
        exploration_mode: "relative" scales the bonuses to 0.3 of the sum of Pi; no lambda.
        history: allocate by expected yield under a Beta prior per prompt of the data set, kept
            across steps (a <- 1/2 + 0.8 (a - 1/2) + wins, b likewise, unseeded rewards only). Where
            a + b > 8 the base is 1, which stays as the audit of prompts that deserve nothing more.
            Greedy or streaming; rewards 0 or 1.
        global_rollouts: what T counts: rollouts handed out in the "step" or in the "run", or the
            number of the "train_step".
        seed: of the hash that breaks ties, with the step and the prompt id.
    Raises:
        ValueError: an option out of its range, or a budget that the base or the cap contradicts.
    Notes:
        A plan does not depend on the order of the prompts, and is the same on every machine.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        total_rollouts: int,
        base_rollouts: int,
        rounds: int = 2,
        exploration: float = 0.1,
        confidence: float = 0.95,
        allocation: Allocation = "proportional",
        max_rollouts_per_prompt: int | None = None,
        std: Std = "sample",
        exploration_mode: ExplorationMode = "absolute",
        history: bool = False,
        global_rollouts: GlobalRollouts = "step",
        seed: int = 0,
    ) -> None:
        _check_choice("allocation", allocation, Allocation)
        _check_choice("std", std, Std)
        _check_choice("exploration_mode", exploration_mode, ExplorationMode)
        _check_choice("global_rollouts", global_rollouts, GlobalRollouts)
        _check_integer("num_prompts", num_prompts, 1)
        _check_integer("rounds", rounds, 1)
        if not 0 < confidence < 1:
            raise ValueError(f"confidence: expected 0 < confidence < 1, got {confidence}")
        if not 0 <= exploration <= MAX_REWARD:
            raise ValueError(f"exploration: expected a finite number >= 0, got {exploration}")
        _check_base(allocation, base_rollouts, history)
        if max_rollouts_per_prompt is not None:
            _check_integer("max_rollouts_per_prompt", max_rollouts_per_prompt, base_rollouts)
        self.allocation: Allocation = allocation
        self.base_rollouts = base_rollouts
        self.max_rollouts_per_prompt = max_rollouts_per_prompt
        self.seed = seed
        self.priors: dict[str, tuple[float, float]] = {}
        """(a, b) of each prompt seen, by id; used and updated with history=True only."""
        self._uses_history = history
        self._is_binary = history or std == "jeffreys"
        self._full_prompts, self._full_total = num_prompts, total_rollouts
        self._prompt_ids: list[str] | None = None
        self._core = _native.RolloutPlanner(
            base_rollouts=base_rollouts,
            rounds=rounds,
            exploration=float(exploration),
            confidence=float(confidence),
            allocation=get_args(Allocation).index(allocation),
            spread=get_args(Std).index(std),
            clock=get_args(GlobalRollouts).index(global_rollouts),
            max_rollouts_per_prompt=max_rollouts_per_prompt,
            is_relative=exploration_mode == "relative",
            use_history=history,
        )
        self._check_budget(num_prompts, total_rollouts)
        self._begin(num_prompts, None, 0, total_rollouts)

    def begin_step(
        self, prompt_ids: Sequence[str], step: int, total_rollouts: int | None = None
    ) -> None:
        """Starts a step over these prompts; statistics start anew, history takes in the last step.

        Args:
            prompt_ids: ids in the data set, unique within the step; any number of them.
            step: number of the training step, >= 0.
            total_rollouts: of this step; None: the full step's, scaled to the number of prompts.
        """
        ids = [str(prompt_id) for prompt_id in prompt_ids]
        if not ids:
            raise ValueError("prompt_ids: expected at least one prompt, got none")
        if len(set(ids)) != len(ids):
            twice = next(prompt_id for prompt_id in ids if ids.count(prompt_id) > 1)
            raise ValueError(f"prompt_ids: expected unique ids within a step, got {twice!r} twice")
        _check_integer("step", step, 0)
        if total_rollouts is None:
            total_rollouts = self._full_total * len(ids) // self._full_prompts
        self._check_budget(len(ids), total_rollouts)
        self._fold_history()
        self._begin(len(ids), ids, step, total_rollouts)

    def _check_budget(self, num_prompts: int, total: int) -> None:
        _check_integer("total_rollouts", total, 1)
        if total > MAX_TOTAL:
            raise ValueError(f"total_rollouts: expected at most {MAX_TOTAL}, got {total}")
        # The uniform rule has no base, but gives to all.
        base = 1 if self.allocation == "uniform" else self.base_rollouts
        least = base * num_prompts
        if total < least:
            raise ValueError(
                f"total_rollouts: expected at least base_rollouts * prompts = "
                f"{base} * {num_prompts} = {least}, got {total}; raise the budget or "
                "lower base_rollouts"
            )
        cap = self.max_rollouts_per_prompt
        if cap is not None and cap * num_prompts < total and self.allocation != "dapo":
            raise ValueError(
                f"max_rollouts_per_prompt: expected at least total_rollouts / prompts = "
                f"{math.ceil(total / num_prompts)}, got {cap}"
            )

    def _begin(self, num_prompts: int, ids: list[str] | None, step: int, total: int) -> None:
        self._prompt_ids = ids
        names = self._names(num_prompts) if self._uses_history else []
        prior = [self.priors.get(name, (PRIOR_COUNT, PRIOR_COUNT)) for name in names]
        a, b = np.array(prior, np.float64).reshape(-1, 2).T
        self._core.begin_step(num_prompts, total, step, self.seed, ids, a, b)

    def _names(self, num_prompts: int) -> list[str]:
        return self._prompt_ids or [str(position) for position in range(num_prompts)]

    def _fold_history(self) -> None:
        if not self._uses_history:
            return
        spent = self._core.counts()
        scored, wins = self._core.unseeded()
        for q, name in enumerate(self._names(len(spent))):
            if spent[q] == 0:
                continue
            a, b = self.priors.get(name, (PRIOR_COUNT, PRIOR_COUNT))
            self.priors[name] = (
                PRIOR_COUNT + HISTORY_DECAY * (a - PRIOR_COUNT) + float(wins[q]),
                PRIOR_COUNT + HISTORY_DECAY * (b - PRIOR_COUNT) + float(scored[q] - wins[q]),
            )

    def plan_round(self, allow_partial: bool = False) -> np.ndarray:
        """Counts of the next phase, (P,) int64: the base first, then each round; zeros once done.

        Args:
            allow_partial: plan from the results that exist instead of raising while some are out.
        Raises:
            RuntimeError: results of handed-out rollouts are missing, or the step is streaming.
        """
        if self._core.is_streaming_step():
            raise RuntimeError(
                "plan_round: expected a step planned in rounds, got one that uses next_prompt; "
                "call begin_step first"
            )
        counts = self._core.plan_round(allow_partial)
        if counts is None:
            raise RuntimeError(
                f"plan_round: expected the results of all {int(self._core.planned().sum())} "
                f"planned rollouts, got {int(self._core.counts().sum())}; observe the others "
                "first, or pass allow_partial=True"
            )
        return counts

    def next_prompt(self) -> int | None:
        """Position of the prompt that gets the next rollout; counts it as in flight.

        None when the budget is spent (`is_done`), or while base results are out (`is_waiting`):
        then observe more and ask again. Base rollouts of all prompts come before any extra one.
        """
        prompts = self.next_prompts(1)
        return prompts[0] if prompts else None

    def next_prompts(self, k: int) -> list[int]:
        """Up to k answers of `next_prompt`, in order; fewer when it would return None."""
        if self.allocation != "streaming":
            raise RuntimeError(
                f"next_prompt: expected allocation='streaming', got {self.allocation!r}; "
                "use plan_round"
            )
        _check_integer("k", k, 0)
        if self._core.uses_rounds():
            raise RuntimeError(
                "next_prompt: expected a streaming step, got one that uses plan_round; "
                "call begin_step first"
            )
        return self._core.next_prompts(k)

    def base_of(self, prompt: int) -> int:
        """Rollouts that a prompt of the step gets before any statistic: 1 where its history tells
        enough, else base_rollouts."""
        return self._core.base_of(prompt)

    @property
    def is_waiting(self) -> bool:
        """The last `next_prompt` had budget but nobody to give it to; observe more."""
        return self._core.is_waiting()

    @property
    def is_done(self) -> bool:
        """All rollouts of the step are handed out ("dapo": or enough groups carry signal)."""
        return self._core.is_done()

    def observe(
        self, prompt_indices: ArrayLike, rewards: ArrayLike, is_seeded: ArrayLike | None = None
    ) -> None:
        """Commits results, in this order.

        Args:
            prompt_indices: (R,) positions in the step, integer.
            rewards: (R,) finite reals up to 1e100, or NaN: unscored, the slot is spent.
            is_seeded: (R,) bool, rollouts that saw worked examples: in the step's statistics, not
                in the history. None: none.
        Raises:
            ValueError: a prompt or reward out of range, or more results than rollouts planned; then
                nothing is committed.
        """
        indices = np.asarray(prompt_indices)
        values = np.asarray(rewards, np.float64)
        if indices.size == 0:
            indices = indices.astype(np.int64)
        if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
            raise TypeError(
                f"prompt_indices: expected (R,) integers, got {indices.dtype} {indices.shape}"
            )
        if values.shape != indices.shape:
            raise ValueError(f"rewards: expected shape {indices.shape}, got {values.shape}")
        seeded = np.zeros(indices.shape, bool) if is_seeded is None else np.asarray(is_seeded, bool)
        if seeded.shape != indices.shape:
            raise ValueError(f"is_seeded: expected shape {indices.shape}, got {seeded.shape}")
        self._core.observe(indices.astype(np.int64), values, seeded, self._is_binary)

    def observe_one(self, prompt: int, reward: float, is_seeded: bool = False) -> None:
        """Commits one result; see `observe`."""
        self._core.observe_one(prompt, reward, is_seeded, self._is_binary)

    def priorities(self) -> np.ndarray:
        """(P,) float64 Pi at the present counts (history: expected yield); NaN where undefined."""
        return self._core.priorities()

    @property
    def counts(self) -> np.ndarray:
        """(P,) int64 results observed, unscored ones included."""
        return self._core.counts()

    @property
    def in_flight(self) -> np.ndarray:
        """(P,) int64 rollouts handed out without a result."""
        return self._core.planned() - self._core.counts()

    @property
    def means(self) -> np.ndarray:
        """(P,) float64 mean reward; NaN without a score."""
        return self._core.means()

    @property
    def stds(self) -> np.ndarray:
        """(P,) float64 sample standard deviation (ddof 1); 0 below two scores."""
        return self._core.stds()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as JSON values; exact also in the middle of a step."""
        return {
            "version": STATE_VERSION,
            "prompt_ids": self._prompt_ids,
            "priors": {name: list(prior) for name, prior in sorted(self.priors.items())},
            "core": {
                name: value.tolist() if isinstance(value, np.ndarray) else value
                for name, value in self._core.get_state().items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken; the planner's options stay its own.

        Raises:
            ValueError: a state of another version, or one that is incomplete.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"state: expected version {STATE_VERSION}, got {state.get('version')!r}"
            )
        missing = {"prompt_ids", "priors", "core"} - state.keys()
        if missing:
            raise ValueError(f"state: expected the keys prompt_ids, priors, core, got no {missing}")
        self._core.set_state(state["core"])
        self._prompt_ids = state["prompt_ids"]
        self.priors = {name: (a, b) for name, (a, b) in state["priors"].items()}


def _check_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")


def _check_base(allocation: Allocation, base_rollouts: int, history: bool) -> None:
    if history and allocation not in ("greedy", "streaming"):
        raise ValueError(
            f"allocation: expected 'greedy' or 'streaming' with history=True, got {allocation!r}"
        )
    _check_integer("base_rollouts", base_rollouts, 1)
    if base_rollouts < 2 and allocation not in ("uniform", "dapo") and not history:
        raise ValueError(
            "base_rollouts: expected at least 2 (the Student-t interval needs a standard "
            f"deviation), got {base_rollouts}"
        )


def _check_choice(name: str, value: str, choices: Any) -> None:
    options: Iterable[str] = get_args(choices)
    if value not in options:
        raise ValueError(f"{name}: expected one of {', '.join(options)}, got {value!r}")

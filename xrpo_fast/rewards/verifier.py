"""Completions in, verdicts out: the rewards of a run behind submit and poll."""

import logging
import math
from collections import deque
from typing import Any

from xrpo_fast.rewards.functions import (
    ItemScorer,
    RewardContractError,
    check_options,
    make_policy,
    part_names,
)
from xrpo_fast.rewards.pool import PoolResult, WorkerPool
from xrpo_fast.types import Prompt, Verdict

logger = logging.getLogger(__name__)

ERROR_WINDOW_ITEMS = 1000
"""The error share is that of the latest items: a verifier may also break late in a run."""
MIN_JUDGED_ITEMS = 20
"""Below so many items an error share says nothing."""
SOLVED_TOLERANCE = 1e-9
THINK_TAG = "<think>"
WORKER_MEMORY_BYTES = 8 << 30
"""Bound on the data of a worker that runs built-in functions only; symbolic algebra on hostile
text would take all memory."""


class Verifier:
    """Scores completions in worker processes, or inline with `workers = 0`.

        reward = sum_f weight_f part_f over the functions f that apply; NaN where none does

    `submit` returns at once; `poll` returns what has finished, in any order. A verdict whose
    verifier failed has reward NaN and `error` set.
    """

    is_think_prefilled = False
    """Set where prompts end in `<think>`: rewards then see completions with that tag in front."""

    def __init__(
        self,
        functions: list[str],
        weights: dict[str, float],
        *,
        full_reward: float,
        max_error_frac: float,
        backend: "InlineScorer | WorkerPool",
    ) -> None:
        self._functions = functions
        self._weights = weights
        self._full_reward = full_reward
        self._max_error_frac = max_error_frac
        self._backend = backend
        self._recent_errors: deque[bool] = deque(maxlen=ERROR_WINDOW_ITEMS)
        self._last_error = ""
        self.num_errors = 0

    @property
    def num_pending(self) -> int:
        return self._backend.num_pending

    @property
    def error_frac(self) -> float:
        """Share of the latest 1,000 items whose verification failed."""
        return sum(self._recent_errors) / max(1, len(self._recent_errors))

    def submit(
        self, key: int, prompt: Prompt, text: str, token_ids: Any, is_truncated: bool
    ) -> None:
        """Queue one completion; `key` comes back with its verdict.

        Args:
            text: the completion, decoded without special tokens; for builtin:symbols with them.
            token_ids: [L] sampled ids.
        """
        item = {
            "question": prompt.question,
            "prompt": prompt.question if prompt.messages is None else prompt.messages,
            "text": f"{THINK_TAG}{text}" if self.is_think_prefilled else text,
            "token_ids": tuple(token_ids),
            "answer": prompt.answer,
            "columns": dict(prompt.columns),
            "is_truncated": is_truncated,
        }
        self._backend.submit(key, item)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Verdict]]:
        """Finished verdicts; waits up to `timeout_s` for the first.

        Raises:
            RewardContractError: a function returned what it may not.
            RuntimeError: the share of failed verifications passed max_error_frac.
        """
        verdicts = [(key, self._judge(result)) for key, result in self._backend.poll(timeout_s)]
        if self._fails_too_often():
            raise RuntimeError(
                f"reward.max_error_frac: expected at most {self._max_error_frac:.1%} of "
                f"verifications to fail, got {self.error_frac:.1%} of the latest "
                f"{len(self._recent_errors)} with {', '.join(self._functions)}; last error: "
                f"{self._last_error}"
            )
        return verdicts

    def _fails_too_often(self) -> bool:
        """More errors than a share of max_error_frac gives by chance, three standard deviations."""
        num = len(self._recent_errors)
        expected = self._max_error_frac * num
        limit = expected + 3.0 * math.sqrt(expected)
        return num >= MIN_JUDGED_ITEMS and sum(self._recent_errors) > limit

    def close(self) -> None:
        self._backend.close()

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, result: PoolResult) -> Verdict:
        value = result.value or {}
        if value.get("contract"):
            raise RewardContractError(value["contract"])
        error = result.error or value.get("error")
        self._recent_errors.append(error is not None)
        if error is not None:
            self._last_error = error
            self.num_errors += 1
            if self.num_errors == 1:
                logger.warning("a verification failed (later ones are only counted): %s", error)
            return Verdict(reward=math.nan, solved=False, error=error)
        parts = {name: part for name, part in value["parts"].items() if part is not None}
        reward = sum(self._weights[name] * part for name, part in parts.items())
        return Verdict(
            reward=reward if parts else math.nan,
            solved=bool(parts) and reward >= self._full_reward - SOLVED_TOLERANCE,
            parts=parts,
            extracted=value["extracted"],
        )


class InlineScorer:
    """The interface of WorkerPool without processes or time limits, for cheap pure functions."""

    def __init__(self, functions: list[str], options: dict[str, Any]) -> None:
        self._scorer = ItemScorer(functions, options)
        self._finished: list[tuple[int, PoolResult]] = []

    @property
    def num_pending(self) -> int:
        return len(self._finished)

    def submit(self, key: int, item: dict[str, Any]) -> None:
        self._finished.append((key, PoolResult(value=self._scorer(item))))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, PoolResult]]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        self._finished = []


def make_verifier(
    functions: list[str],
    *,
    weights: list[float] | None = None,
    full_reward: float = 1.0,
    workers: int = 0,
    timeout_s: float = 10.0,
    max_error_frac: float = 0.05,
    options: dict[str, dict[str, Any]] | None = None,
) -> Verifier:
    """Verifier over the named reward functions.

    Args:
        functions: "math", "code", "exact", "builtin:symbols", "reasoning_gym", or
            "package.module:function" with the signature of TRL,
            f(prompts, completions, completion_ids=None, **columns) -> list[float | None];
            None or NaN = not applicable. As in TRL, a chat prompt makes the completion a list of
            one assistant message.
        weights: one per function; default 1 each.
        full_reward: combined reward from which a completion counts as solved.
        workers: processes; 0 = inline, without a time limit, for cheap pure functions only.
        timeout_s: wall-clock seconds per completion. Code tests have their own limit
            (`options["code"]["sample_timeout_s"]`), which is added.
        max_error_frac: share of failed verifications, of the latest 1,000, that stops the run.
        options: keyword arguments of the built-in functions, by function name.
    Raises:
        ValueError: a name, a weight or a number is not one of these.
    """
    weights = _checked_weights(functions, weights)
    options = dict(options or {})
    if unknown := set(options) - set(functions):
        raise ValueError(f"options: expected names among {functions}, got {sorted(unknown)}")
    check_options(options)
    unbounded = {"math", "code", "reasoning_gym"} & set(functions)
    if workers < 0 or (workers == 0 and unbounded):
        least = f">= 1 for {sorted(unbounded)}" if unbounded else ">= 0"
        raise ValueError(
            f"workers: expected {least}, got {workers}; model text can keep them busy for ever, "
            "and only a worker process can be stopped"
        )
    if not timeout_s > 0 or not 0 <= max_error_frac <= 1:
        raise ValueError(
            "timeout_s, max_error_frac: expected > 0 and 0..1, got "
            f"{timeout_s} and {max_error_frac}"
        )
    backend = _make_backend(functions, options, workers, timeout_s)
    return Verifier(
        list(functions),
        dict(zip(part_names(functions), weights, strict=True)),
        full_reward=full_reward,
        max_error_frac=max_error_frac,
        backend=backend,
    )


def _checked_weights(functions: list[str], weights: list[float] | None) -> list[float]:
    if not functions or len(set(functions)) != len(functions):
        raise ValueError(f"functions: expected at least one, none twice, got {functions}")
    weights = [1.0] * len(functions) if weights is None else weights
    if len(weights) != len(functions) or not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights: expected {len(functions)} finite numbers, got {weights}")
    return weights


def _make_backend(
    functions: list[str], options: dict[str, Any], workers: int, timeout_s: float
) -> InlineScorer | WorkerPool:
    if workers == 0:
        return InlineScorer(functions, options)
    if "code" in functions:
        from xrpo_fast.rewards.code import CodePolicy

        timeout_s += make_policy(CodePolicy, "code", options.get("code", {})).sample_timeout_s
    has_user_function = any(":" in name and not name.startswith("builtin:") for name in functions)
    return WorkerPool(
        functions,
        options,
        num_workers=workers,
        timeout_s=timeout_s,
        memory_bytes=None if has_user_function else WORKER_MEMORY_BYTES,
    )

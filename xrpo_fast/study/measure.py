"""One finished run -> the numbers that are compared. Pure functions of metrics.jsonl's rows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = Mapping[str, Any]

UNITS = {
    "steps": "steps",
    "rollouts": "rollouts",
    "tokens": "generated tokens",
    "seconds": "training seconds",
}
"""What it cost to reach a target; seconds are those of training steps, without evaluations."""

MECHANISMS = {
    "dead_groups": "dead groups",
    "flipped": "hopeless prompts solved in their step",
    "answer_tokens": "answer length, tokens",
    "grad_norm": "gradient norm",
    "gini": "inequality of rollouts (Gini)",
    "rollouts_per_step": "rollouts per step",
    "step_seconds": "seconds per step",
}
PAIRED_MECHANISMS = ("dead_groups", "flipped", "answer_tokens", "grad_norm")
"""What is compared with the reference; seconds and rollouts are by what a target cost."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a target took; where it was not reached, what was spent without reaching it."""

    value: float
    is_reached: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The numbers of one run."""

    arm: str
    seed: int
    steps: np.ndarray
    """Steps that were evaluated, the one before training included."""
    accuracy: np.ndarray
    """pass@1 at those steps."""
    final: dict[str, float]
    """pass@1, pass@k, cons@k and tier/... at the last step, by name."""
    costs: dict[str, dict[str, Cost]]
    """unit -> target as text -> cost."""
    mechanisms: dict[str, float]
    """By name of MECHANISMS; what does not apply to the run is left out."""


def measure(
    rows: Sequence[Row], *, arm: str, seed: int, eval_set: str, targets: Sequence[float]
) -> Measured:
    """Numbers of a run whose metrics are complete.

    Raises:
        ValueError: the set was not evaluated before the first step and after the last.
    """
    key = f"eval/{eval_set}/pass@1"
    evals = [row for row in rows if isinstance(row.get(key), int | float)]
    if len(evals) < 2 or evals[0]["step"] != 0 or evals[-1]["step"] != rows[-1]["step"]:
        raise ValueError(f"{key}: expected it before the first step and after the last, got less")
    steps = np.array([row["step"] for row in evals])
    accuracy = np.array([row[key] for row in evals], dtype=np.float64)
    spent = spending(rows)
    return Measured(
        arm=arm,
        seed=seed,
        steps=steps,
        accuracy=accuracy,
        final=final_numbers(evals[-1], eval_set),
        costs={
            unit: {
                target_text(target): cost_of(target, steps, accuracy, spent[unit])
                for target in targets
            }
            for unit in UNITS
        },
        mechanisms=mechanisms(rows, evals[-1], eval_set),
    )


def target_text(target: float) -> str:
    """An accuracy as tables name it, and as keys of the results do."""
    return f"{100 * target:g}%"


def spending(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """unit -> (last step + 1,) spent up to each step; 0 before the first."""
    trained = [row for row in rows if row["step"] > 0]
    logged = {
        "rollouts": "planner/rollouts",
        "tokens": "tokens/generated",
        "seconds": "timing_s/step",
    }
    spent = {
        unit: np.concatenate([[0.0], np.cumsum([_number(row, key) for row in trained])])
        for unit, key in logged.items()
    }
    return {"steps": np.arange(len(trained) + 1, dtype=np.float64), **spent}


def cost_of(target: float, steps: np.ndarray, accuracy: np.ndarray, spent: np.ndarray) -> Cost:
    """What the first crossing of the target cost, on the line between two evaluations.

    Args:
        steps, accuracy: (E,) evaluations, ascending in step.
        spent: (last step + 1,) spent up to each step.
    """
    above = np.flatnonzero(accuracy >= target)
    if not len(above):
        return Cost(float(spent[steps[-1]]), False)
    i = int(above[0])
    if i == 0:
        return Cost(float(spent[steps[0]]), True)
    part = (target - accuracy[i - 1]) / (accuracy[i] - accuracy[i - 1])
    step = steps[i - 1] + part * (steps[i] - steps[i - 1])
    return Cost(float(np.interp(step, np.arange(len(spent)), spent)), True)


def final_numbers(row: Row, eval_set: str) -> dict[str, float]:
    """pass@k, cons@k and accuracy per tier of one evaluation by short name, and pass@1 of the other
    sets by theirs."""
    prefix = f"eval/{eval_set}/"
    found = {
        key.removeprefix(prefix).removesuffix("/pass@1")
        if "/tier/" in key
        else key[len(prefix) :]: v
        for key, v in row.items()
        if key.startswith(prefix) and isinstance(v, int | float)
    }
    wanted = ("pass@", "cons@", "tier/")
    own = {
        name: float(value)
        for name, value in found.items()
        if name.startswith(wanted) and not name.endswith(("/low", "/high"))
    }
    others = {
        f"{match[1]} pass@1": float(value)
        for key, value in row.items()
        if (match := re.fullmatch(r"eval/([^/]+)/pass@1", key)) and match[1] != eval_set
    }
    return {**own, **others}


def mechanisms(rows: Sequence[Row], last_eval: Row, eval_set: str) -> dict[str, float]:
    """What went on in training, by name of MECHANISMS."""
    trained = [row for row in rows if row["step"] > 0]
    hopeless = sum(row.get("icl/hopeless_prompts") or 0 for row in trained)
    flipped = sum(row.get("icl/flipped_prompts") or 0 for row in trained)
    values = {
        "dead_groups": _mean(trained, "groups/zero_variance_frac"),
        # An arm without rounds after the base cannot flip a prompt, and logs no hopeless ones.
        "flipped": flipped / hopeless if hopeless else None,
        "answer_tokens": last_eval.get(f"eval/{eval_set}/mean_length"),
        "grad_norm": _mean(trained, "grad_norm"),
        "gini": _mean(trained, "planner/gini"),
        "rollouts_per_step": _mean(trained, "planner/rollouts"),
        "step_seconds": _mean(trained, "timing_s/step"),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def _mean(rows: Sequence[Row], key: str) -> float | None:
    """Mean over the steps that logged a number; None where none did."""
    values = [row[key] for row in rows if isinstance(row.get(key), int | float)]
    return float(np.mean(values)) if values else None


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"{key}: expected a number at step {row['step']}, got {value!r}")
    return float(value)

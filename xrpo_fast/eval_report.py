"""Samples -> the numbers of a result, its comparison with another one, and its tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from xrpo_fast.config import ConfigError
from xrpo_fast.estimators import (
    cons_difference,
    mean_difference,
    pass_difference,
    pass_interval,
)
from xrpo_fast.eval_store import read_result, read_samples
from xrpo_fast.evaluator import (
    Equivalence,
    Evaluator,
    Sample,
    cons_of,
    counts_of,
    votes_of,
    with_bounds,
)
from xrpo_fast.metrics import to_json_number
from xrpo_fast.types import Prompt


def summarise_set(
    evaluator: Evaluator, prompts: Sequence[Prompt], samples: Sequence[Sample], ks: Sequence[int]
) -> dict[str, Any]:
    """The metrics of training's evaluation, avg@n over all samples, and more on lengths."""
    values = evaluator.summarise("", prompts, samples, ks)
    metrics = {name.removeprefix("eval//"): value for name, value in values.items()}
    num_samples, num_correct = counts_of(prompts, samples)
    average = pass_interval(num_samples, num_correct, 1, evaluator.seed)
    metrics = {**with_bounds(f"avg@{num_samples.min()}", average), **metrics}
    metrics.update(length_metrics(samples))
    return {name: to_json_number(value) for name, value in metrics.items()}


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens of the responses, of the solved ones and of the others; NaN where there are none."""
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.float64)
    solved = np.array([sample.verdict.solved for sample in samples])
    quantiles = np.quantile(lengths, [0.5, 0.95])
    return {
        "median_length": float(quantiles[0]),
        "p95_length": float(quantiles[1]),
        "max_length": float(lengths.max()),
        "mean_length_solved": float(lengths[solved].mean()) if solved.any() else float("nan"),
        "mean_length_unsolved": float(lengths[~solved].mean())
        if not solved.all()
        else float("nan"),
    }


def compare(
    path: Path,
    ours: Mapping[str, Any],
    sets: Mapping[str, Sequence[Prompt]],
    samples: Mapping[str, Sequence[Sample]],
    ks: Sequence[int],
    equivalent: Equivalence | None,
) -> dict[str, Any]:
    """Ours minus the other result, paired by question, for the sets that both have.

    Raises:
        ConfigError: another grader, other questions under the same name, or no set in common.
    """
    theirs = read_result(path)
    if theirs["grader"] != ours["grader"]:
        raise ConfigError(
            f"--against: expected a result of the same grader {ours['grader']}, got "
            f"{theirs['grader']} in {path}; evaluate it again"
        )
    shared = [name for name in ours["sets"] if name in theirs["sets"]]
    for name in shared:
        mine, other = (side["sets"][name]["questions_fingerprint"] for side in (ours, theirs))
        if mine != other:
            raise ConfigError(
                f"--against: expected the same questions in set {name!r}, got others in {path}; "
                "evaluate both on the same data"
            )
    if not shared:
        raise ConfigError(
            f"--against: expected a set among {', '.join(ours['sets'])} in {path}, got "
            f"{', '.join(theirs['sets'])}"
        )
    seed, num_theirs = ours["sampling"]["seed"], theirs["sampling"]["samples"]
    differences = {}
    for name in shared:
        stored, _ = read_samples(path.parent / f"samples_{name}.parquet")
        others = [sample for sample in stored if sample.sample_index < num_theirs]
        differences[name] = paired_differences(
            sets[name], samples[name], others, ks, seed=seed, equivalent=equivalent
        )
    return {"result": str(path), "model": theirs["model"], "sets": differences}


def paired_differences(
    prompts: Sequence[Prompt],
    ours: Sequence[Sample],
    theirs: Sequence[Sample],
    ks: Sequence[int],
    *,
    seed: int,
    equivalent: Equivalence | None,
) -> dict[str, float]:
    """Ours minus theirs by metric, each with .../low and .../high of its paired 95 % interval."""
    values: dict[str, float] = {}
    counts = [counts_of(prompts, side) for side in (ours, theirs)]
    fewest = min(int(num_samples.min()) for num_samples, _ in counts)
    has_answers = all(any(s.verdict.extracted is not None for s in side) for side in (ours, theirs))
    votes = [votes_of(prompts, side, equivalent) for side in (ours, theirs)] if has_answers else []
    for k in [k for k in ks if k <= fewest]:
        values.update(with_bounds(f"pass@{k}", pass_difference(counts[0], counts[1], k, seed)))
        if k > 1 and votes:
            points = [cons_of(side, k, seed) for side in votes]
            point = float((points[0] - points[1]).mean())
            gap = cons_difference(votes[0], votes[1], k, point, seed)
            values.update(with_bounds(f"cons@{k}", gap))
    lengths = [mean_lengths(len(prompts), side) for side in (ours, theirs)]
    values.update(with_bounds("mean_length", mean_difference(lengths[0], lengths[1], seed)))
    return values


def mean_lengths(num_prompts: int, samples: Sequence[Sample]) -> np.ndarray:
    """(Q,) mean tokens per response of each question."""
    index = [sample.prompt_index for sample in samples]
    lengths = [len(sample.token_ids) for sample in samples]
    return np.bincount(index, lengths, num_prompts) / np.bincount(index, minlength=num_prompts)


def show(result: Mapping[str, Any], console: Console) -> None:
    """One table per set: each metric with its interval, and the difference where compared."""
    against = result.get("against") or {"model": "", "sets": {}}
    for name, held_out in result["sets"].items():
        differences = against["sets"].get(name, {})
        title = (
            f"{name}: {held_out['questions']} questions, {result['sampling']['samples']} samples"
        )
        table = Table(title=title, title_justify="left")
        table.add_column("")
        table.add_column("value [95 %]", justify="right")
        if differences:
            table.add_column(f"minus {against['model']} [95 %]", justify="right")
        metrics = held_out["metrics"]
        for key in [k for k in metrics if not k.endswith(("/low", "/high"))]:
            cells = [key, _cell(metrics, key)]
            table.add_row(*cells, *([_cell(differences, key, "+")] if differences else []))
        graders = ", ".join(f"{f} ({v})" for f, v in result["grader"]["functions"].items())
        table.caption = f"{result['model']}; graded by {graders}"
        console.print(table)


def _cell(values: Mapping[str, Any], key: str, sign: str = "") -> str:
    value = values.get(key)
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if f"{key}/low" not in values:
        return f"{value:{sign}.3f}"
    low, high = values[f"{key}/low"], values[f"{key}/high"]
    return f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"

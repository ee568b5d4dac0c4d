"""Run folders as the report reads them: config, metrics, rollouts, and what is missing."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xrpo_fast.metrics import read_metrics

COLUMNS = (
    "step",
    "prompt_id",
    "prompt_index",
    "group",
    "round",
    "seeded",
    "similarity",
    "solved",
    "num_tokens",
    "advantage",
    "bonus",
    "score",
)
TEXT_COLUMNS = (
    "step",
    "prompt_id",
    "tier",
    "question",
    "response",
    "solved",
    "seeded",
    "num_tokens",
)


class ReportError(ValueError):
    """A run folder that cannot be shown. Exit code 2."""


@dataclass(kw_only=True, slots=True)
class Run:
    """One run folder, read."""

    name: str
    path: Path
    config: Mapping[str, Any]
    rows: list[dict[str, Any]]
    """Lines of metrics.jsonl, ascending in step."""
    rollouts: dict[str, np.ndarray]
    """Columns of all rollouts; empty arrays where none were recorded."""
    texts: list[dict[str, Any]]
    """Rollouts whose text was kept, in order of step."""
    notes: list[str] = field(default_factory=list)
    """What is missing or broken, for the reader."""

    @property
    def num_steps(self) -> int:
        """Last step with metrics."""
        return self.rows[-1]["step"]

    @property
    def has_rollouts(self) -> bool:
        return len(self.rollouts["step"]) > 0

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one metric, where it was logged as a number."""
        points = [
            (row["step"], row[key]) for row in self.rows if isinstance(row.get(key), int | float)
        ]
        steps, values = np.array(points, np.float64).reshape(-1, 2).T
        return steps, values

    def eval_sets(self) -> list[str]:
        """Names of the evaluation sets, in order of appearance."""
        suffix = "/pass@1"
        return list(
            dict.fromkeys(
                key.removeprefix("eval/").removesuffix(suffix)
                for row in self.rows
                for key in row
                if key.startswith("eval/") and key.endswith(suffix) and "/tier/" not in key
            )
        )


def load_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """All run folders, of one task, under distinct names.

    Raises:
        ReportError: no folder, one that is unreadable, or runs of different tasks.
    """
    if not run_dirs:
        raise ReportError("run_dirs: expected at least one run folder, got none")
    runs = [_load_run(Path(path)) for path in run_dirs]
    tasks = {_task(run): run for run in runs}
    if len(tasks) > 1:
        listing = ", ".join(f"{run.path}: {task}" for task, run in tasks.items())
        raise ReportError(
            f"run_dirs: expected runs of one task, got {listing}; make one report per task"
        )
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.path)
    return runs


def _task(run: Run) -> str:
    """Training and evaluation data, by what decides whether curves may share an axis."""
    data = run.config.get("data", {})
    sources = data.get("eval") or {}
    sets = [
        f"{name} = {sources[name]!r}" if name in sources else name
        for name in dict.fromkeys([*run.eval_sets(), *sources])
    ]
    task = f"train {data.get('train')!r}, evaluation {', '.join(sets) if sets else 'none'}"
    if sources:
        # The sets that a task brings itself have a split of their own.
        task += f" (split {data.get('eval_split')!r})"
    most = run.config.get("eval", {}).get("max_prompts", 0)
    return f"{task}, first {most} prompts of each set" if most else task


def _load_run(path: Path) -> Run:
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ReportError(
            f"run_dirs: expected a run folder with a readable config.toml, got {path} ({error})"
        ) from error
    rows, notes = _load_metrics(path)
    asked = config.get("run", {}).get("steps")
    if isinstance(asked, int) and rows[-1]["step"] < asked:
        notes.append(f"Ends at step {rows[-1]['step']} of {asked}: stopped early or still running.")
    if not any(key.startswith("eval/") for row in rows for key in row):
        notes.append("No evaluation was logged.")
    rollouts, texts = _load_rollouts(path, rows[-1]["step"], notes)
    return Run(
        name=config.get("run", {}).get("name") or path.resolve().name,
        path=path,
        config=config,
        rows=rows,
        rollouts=rollouts,
        texts=texts,
        notes=notes,
    )


def _load_metrics(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    file = path / "metrics.jsonl"
    try:
        rows = read_metrics(file)
        num_lines = len(file.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        raise ReportError(
            f"run_dirs: expected a readable metrics.jsonl in {path}, got {error}"
        ) from error
    if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
        raise ReportError(f"run_dirs: expected a step in each line of {file}, got one without")
    if not any(row["step"] > 0 for row in rows):
        raise ReportError(f"run_dirs: expected at least one step in {file}, got none; train first")
    steps = [row["step"] for row in rows]
    if steps != sorted(set(steps)):
        raise ReportError(f"run_dirs: expected ascending steps in {file}, got a repeated one")
    broken = num_lines - len(rows)
    return rows, ["The last line of metrics.jsonl is cut off and left out."] if broken else []


def _load_rollouts(
    path: Path, last_step: int, notes: list[str]
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Columns and texts of all steps that metrics.jsonl holds; broken files become notes."""
    tables, texts, broken = [], [], []
    for step in range(1, last_step + 1):
        file = path / "rollouts" / f"step_{step}.parquet"
        if not file.exists():
            continue
        try:
            table = pq.read_table(file, columns=list({*COLUMNS, *TEXT_COLUMNS}))
        except (OSError, pa.ArrowException, KeyError) as error:
            broken.append(f"{file.name} ({type(error).__name__})")
            continue
        tables.append(table.select(COLUMNS))
        with_text = table.filter(table["response"].is_valid())
        texts += with_text.select(TEXT_COLUMNS).to_pylist()
    if broken:
        listing = ", ".join(broken[:3]) + (" ..." if len(broken) > 3 else "")
        notes.append(f"{len(broken)} rollout files cannot be read and are left out: {listing}.")
    missing = last_step - len(tables) - len(broken)
    if missing:
        notes.append(f"Rollouts of {missing} of {last_step} steps were not recorded.")
    if not tables:
        return {name: np.empty(0) for name in COLUMNS}, []
    whole = pa.concat_tables(tables, promote_options="permissive")
    return {name: whole[name].to_numpy(zero_copy_only=False) for name in COLUMNS}, texts

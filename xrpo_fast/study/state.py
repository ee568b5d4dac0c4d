"""What a run's folder says about it: to start, to go on with, done, or not to be touched."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xrpo_fast.checkpoint import latest_checkpoint
from xrpo_fast.config import Config, ConfigError
from xrpo_fast.config_file import load_config
from xrpo_fast.metrics import read_metrics
from xrpo_fast.run_dir import RunDir, flat_keys
from xrpo_fast.study.plan import PlannedRun, Study
from xrpo_fast.train import EXIT_INTERRUPTED

FREE_KEYS = ("run.output_dir",)
"""The same folder may be named from elsewhere."""
STOPPED = (EXIT_INTERRUPTED, -signal.SIGINT)
"""Exit codes of a run that was asked to stop; the second, of one that was still loading."""
AT_WORK = "at work"
"""Stands in place of an exit code from a run's start on; it stays where the study is killed."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What is left to do for a run.

    new: nothing there; early: broken off before its first checkpoint; partial: goes on from a
    checkpoint; finished: complete metrics and exit code 0; unreadable: `reason` says what cannot be
    read. A run that failed is tried again: from its last checkpoint, which costs no step where it
    failed after the last one, as a run does that trained nothing.
    """

    kind: Literal["new", "early", "partial", "finished", "unreadable"]
    steps_done: int = 0
    reason: str = ""
    exit_code: int | None = None
    """Of the last try, where it ended under a study's eyes."""

    @property
    def has_failed(self) -> bool:
        return self.exit_code not in (None, 0, *STOPPED)


def exit_code_file(run: PlannedRun) -> Path:
    """Outside the run's folder, which a run that cannot start does not make."""
    return run.config.run.output_dir / "exit_codes" / f"{run.name}.txt"


def note_start(run: PlannedRun) -> None:
    """From now on, metrics that are complete are no proof that the run ended well."""
    exit_code_file(run).parent.mkdir(parents=True, exist_ok=True)
    exit_code_file(run).write_text(AT_WORK, encoding="utf-8")


def note_exit(run: PlannedRun, code: int) -> None:
    exit_code_file(run).write_text(str(code), encoding="utf-8")


def _exit_code(run: PlannedRun) -> tuple[int | None, bool]:
    """The last try's exit code, None where it is not known; whether a try is known to have ended
    well. A run that no study has started, trained elsewhere, is taken at its metrics' word."""
    path = exit_code_file(run)
    if not path.exists():
        return None, True
    text = path.read_text(encoding="utf-8")
    try:
        return int(text), int(text) == 0
    except ValueError:
        return None, False


def state_of(run: PlannedRun, eval_set: str) -> RunState:
    """The state of a run's folder.

    Raises:
        ConfigError: the folder holds something else, or a run of another configuration.
    """
    folder = RunDir(run.path)
    exit_code, has_ended_well = _exit_code(run)
    if folder.is_new:
        return RunState("new", exit_code=exit_code)
    if not folder.config.exists():
        raise ConfigError(
            f"output_dir: expected the run folder {folder.path} to be new or to hold a config.toml,"
            " found files without one; move them away or choose another output_dir"
        )
    check_same(run, load_config(folder.config))
    try:
        rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
        steps = step_numbers(rows, folder)
    except (OSError, ValueError) as error:
        return RunState("unreadable", reason=str(error))
    done = max(steps, default=0)
    last = run.config.run.steps
    if has_ended_well and done == last and f"eval/{eval_set}/pass@1" in rows[-1]:
        return RunState("finished", done)
    checkpoint = latest_checkpoint(folder.path)
    if checkpoint is None:
        return RunState("early", exit_code=exit_code)
    step = int(checkpoint.name.removeprefix("step_"))
    return RunState("partial", step, exit_code=exit_code)


def states_of(study: Study) -> dict[str, RunState]:
    """State of every run, by name; ConfigError where a folder belongs to something else."""
    return {run.name: state_of(run, study.file.eval_set) for run in study.runs}


def step_numbers(rows: list[dict[str, Any]], folder: RunDir) -> list[int]:
    """Steps of the rows; a ValueError where they are not 0, 1, 2, ..."""
    steps = [row.get("step") if isinstance(row, dict) else None for row in rows]
    if steps != list(range(len(steps))):
        raise ValueError(f"{folder.metrics}: expected one line per step from 0 on, got another")
    return list(range(len(steps)))


def check_same(run: PlannedRun, found: Config) -> None:
    """ConfigError, which names the key, where the folder's run is not the one planned."""
    ours, theirs = (
        dict(flat_keys(config.model_dump(mode="json"))) for config in (run.config, found)
    )
    for key in sorted(ours.keys() | theirs.keys()):
        if key not in FREE_KEYS and ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"arms.{run.arm}: expected {key} = {ours.get(key)!r} in the run folder {run.path}, "
                f"found {theirs.get(key)!r}; undo the change, choose another output_dir, or remove "
                "the folder to run it anew"
            )

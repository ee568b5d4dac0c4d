"""What a run's folder says about it: to start, to go on with, done, or not to be touched."""

from dataclasses import dataclass
from typing import Any, Literal

from xrpo_fast.checkpoint import latest_checkpoint
from xrpo_fast.config import Config, ConfigError
from xrpo_fast.config_file import load_config
from xrpo_fast.metrics import read_metrics
from xrpo_fast.run_dir import RunDir
from xrpo_fast.study.plan import PlannedRun, Study, flat_keys

FREE_KEYS = ("run.output_dir",)
"""The same folder may be named from elsewhere."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What is left to do for a run.

    new: nothing there; early: broken off before its first checkpoint; partial: goes on from a
    checkpoint; finished: complete metrics; unreadable: `reason` says what cannot be read.
    """

    kind: Literal["new", "early", "partial", "finished", "unreadable"]
    steps_done: int = 0
    reason: str = ""


def state_of(run: PlannedRun, eval_set: str) -> RunState:
    """The state of a run's folder.

    Raises:
        ConfigError: the folder holds something else, or a run of another configuration.
    """
    folder = RunDir(run.path)
    if not folder.path.exists() or not any(folder.path.iterdir()):
        return RunState("new")
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
    if done == last and f"eval/{eval_set}/pass@1" in rows[-1]:
        return RunState("finished", done)
    checkpoint = latest_checkpoint(folder.path)
    if checkpoint is None:
        return RunState("early")
    return RunState("partial", int(checkpoint.name.removeprefix("step_")))


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

"""Runs what a study still lacks, some at a time, under one progress display."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from xrpo_fast.metrics import read_last_metrics
from xrpo_fast.study.children import Child, start
from xrpo_fast.study.plan import PlannedRun, Study
from xrpo_fast.study.state import STOPPED, RunState, note_exit, state_of

POLL_S = 0.5


def run_all(
    study: Study,
    states: Mapping[str, RunState],
    lock: IO[str],
    console: Console,
    should_stop: Callable[[], bool],
) -> list[str]:
    """Run everything that is not finished; names of the runs that failed.

    Asked to stop, the runs under way end after their step with a checkpoint and no other starts;
    an exception, such as a second Ctrl-C, kills them.
    """
    waiting = [run for run in study.runs if states[run.name].kind in ("new", "early", "partial")]
    failed = [run.name for run in study.runs if states[run.name].kind == "unreadable"]
    running: list[Child] = []
    is_stopping = False
    with StudyDisplay(console, study.runs, states) as display:
        try:
            while running or (waiting and not is_stopping):
                if should_stop() and not is_stopping:
                    is_stopping = True
                    for child in running:
                        child.ask_to_stop()
                while waiting and len(running) < study.file.parallel and not is_stopping:
                    run = waiting.pop(0)
                    display.started(run, states[run.name])
                    running.append(start(run, states[run.name], lock))
                time.sleep(POLL_S)
                display.show(running)
                for child in [child for child in running if child.process.poll() is not None]:
                    running.remove(child)
                    note_exit(child.run, child.process.returncode)
                    if not display.ended(child, study.file.eval_set, is_stopping):
                        failed.append(child.run.name)
        finally:
            for child in running:
                child.kill()
    return failed


class StudyDisplay:
    """One bar over the steps of all runs; a line where a run starts and where it ends."""

    def __init__(
        self, console: Console, runs: Sequence[PlannedRun], states: Mapping[str, RunState]
    ) -> None:
        self._console = console
        self._steps = {run.name: states[run.name].steps_done for run in runs}
        self._num_runs = len(runs)
        self._num_steps = sum(run.config.run.steps for run in runs)
        self._first_steps = sum(self._steps.values())
        self._start_s = time.monotonic()
        self._num_finished = sum(state.kind == "finished" for state in states.values())
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            # Arms differ in speed: an estimate from the last seconds would jump about.
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=600,
        )
        self._task = self._progress.add_task(
            "study",
            total=self._num_steps,
            completed=self._first_steps,
        )

    def __enter__(self) -> "StudyDisplay":
        if self._num_finished:
            self._say(f"{self._num_finished} of {self._num_runs} runs are there already")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, run: PlannedRun, state: RunState) -> None:
        failed = f"failed with exit code {state.exit_code} before, " if state.has_failed else ""
        if state.kind == "partial":
            self._say(f"{run.name}: {failed}goes on from step {state.steps_done}")
        elif state.kind == "early":
            why = failed or "was broken off before its first checkpoint, "
            self._say(f"{run.name}: {why}starts over")
        elif not self._console.is_terminal:
            self._say(f"{run.name}: starts")

    def show(self, running: Sequence[Child]) -> None:
        """Steps done so far, as the runs' metrics tell."""
        for child in running:
            self._steps[child.run.name] = _last_row(child.run.path)["step"]
        names = ", ".join(child.run.name for child in running)
        self._progress.update(
            self._task,
            completed=sum(self._steps.values()),
            description=f"{self._num_finished}/{self._num_runs} runs  {names}",
        )

    def ended(self, child: Child, eval_set: str, is_stopping: bool) -> bool:
        """Say how a run ended; False where it failed."""
        run, code = child.run, child.process.returncode
        state = state_of(run, eval_set)
        self._steps[run.name] = state.steps_done
        if code == 0 and state.kind == "finished":
            self._num_finished += 1
            accuracy = _last_row(run.path)[f"eval/{eval_set}/pass@1"]
            self._say(
                f"{self._num_finished}/{self._num_runs}  {run.name}: pass@1 {accuracy:.3f}"
                f"{self._left_text()}"
            )
            return True
        if is_stopping and code in STOPPED:
            self._say(f"{run.name}: stopped; the same command goes on with it")
            return True
        self._say(f"{run.name}: failed with exit code {code}; the end of {child.log}:", "red")
        self._say(child.log_tail())
        return False

    def _left_text(self) -> str:
        """Minutes left at the pace so far."""
        done = sum(self._steps.values())
        left = self._num_steps - done
        minutes = (time.monotonic() - self._start_s) / 60 * left / max(done - self._first_steps, 1)
        return f"; about {minutes:.0f} min left" if left else ""

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _last_row(folder: Path) -> dict[str, Any]:
    """The last line of a run's metrics; step 0 where there is none yet."""
    path = folder / "metrics.jsonl"
    row = read_last_metrics(path) if path.exists() else None
    return row or {"step": 0}

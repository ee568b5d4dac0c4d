"""What a person sees: progress while training, a table and a learning curve at the end.

On a terminal the progress line is redrawn in place; elsewhere (log files, CI) a plain line is
printed every few steps.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

PLAIN_LINES_PER_RUN = 20
CURVE_WIDTH, CURVE_HEIGHT = 60, 10


class TrainingDisplay:
    """Progress of the steps: reward, accuracy, dead groups, time left."""

    def __init__(self, console: Console, num_steps: int, steps_done: int) -> None:
        self.console = console
        self._num_steps = num_steps
        self._first_step = steps_done
        self._start_s = time.monotonic()
        self._accuracy: float | None = None
        self._plain_every = max(1, num_steps // PLAIN_LINES_PER_RUN)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=steps_done)

    def __enter__(self) -> "TrainingDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        key = f"eval/{name}/pass@1"
        self._accuracy = metrics[key]
        self.console.print(
            f"step {step}: held-out accuracy on {name} {metrics[key]:.3f} "
            f"[{metrics[key + '/low']:.3f}, {metrics[key + '/high']:.3f}]",
            markup=False,
            highlight=False,
        )

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> None:
        reward = metrics["reward/mean"]
        dead = metrics["groups/zero_variance_frac"]
        # None before the first evaluation of a run that is resumed.
        accuracy = "-" if self._accuracy is None else f"{self._accuracy:.3f}"
        text = f"reward {reward:.3f}  accuracy {accuracy}  dead groups {dead:.0%}"
        self._progress.update(self._task, completed=step, description=text)
        if not self.console.is_terminal and step % self._plain_every == 0:
            done = step - self._first_step
            left_s = (time.monotonic() - self._start_s) / done * (self._num_steps - step)
            self.console.print(
                f"step {step}/{self._num_steps}  {text}  {left_s:.0f} s left",
                markup=False,
                highlight=False,
            )


class SamplingDisplay:
    """Progress of an evaluation's samples."""

    def __init__(self, console: Console, name: str, num_samples: int, num_done: int) -> None:
        self.console = console
        self._name = name
        self._num_samples = num_samples
        self._num_done = num_done
        self._plain_every = max(1, num_samples // PLAIN_LINES_PER_RUN)
        self._progress = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(name, total=num_samples, completed=num_done)

    def __enter__(self) -> "SamplingDisplay":
        if self._num_done:
            self._say(f"{self._num_done} of {self._num_samples} samples are there already")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self) -> None:
        """One more sample."""
        self._num_done += 1
        self._progress.update(self._task, completed=self._num_done)
        if not self.console.is_terminal and self._num_done % self._plain_every == 0:
            self._say(f"{self._num_done}/{self._num_samples} samples")

    def _say(self, text: str) -> None:
        self.console.print(f"{self._name}: {text}", markup=False, highlight=False)


def accuracy_table(first: Mapping[str, float], last: Mapping[str, float], name: str) -> Table:
    """Held-out accuracy before and after, whole set and per tier."""
    table = Table(title=f"Held-out accuracy ({name})", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    prefix = f"eval/{name}/"
    for key in [k for k in last if k.startswith(prefix) and f"{k}/low" in last]:
        table.add_row(
            key.removeprefix(prefix), _with_interval(first, key), _with_interval(last, key)
        )
    for key in [k for k in last if k.startswith(f"{prefix}tier/")]:
        tier = key.removeprefix(f"{prefix}tier/")
        table.add_row(tier, f"{first.get(key, float('nan')):.3f}", f"{last[key]:.3f}")
    return table


def _with_interval(values: Mapping[str, float], key: str) -> str:
    if key not in values:
        return "-"
    return f"{values[key]:.3f} [{values[key + '/low']:.3f}, {values[key + '/high']:.3f}]"


def rollout_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Where the rollouts of all steps went, by tier, and what seeding did."""
    table = Table(title="Where the rollouts went", title_justify="left")
    for column in ("tier", "rollouts", "share", "solved"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    tiers = sorted({key.split("/")[1] for row in rows for key in row if key.startswith("tier/")})
    total = sum(row["planner/rollouts"] for row in rows)
    for tier in tiers:
        counts = [row.get(f"tier/{tier}/rollouts", 0) for row in rows]
        solved = [row.get(f"tier/{tier}/solved_frac", 0) or 0 for row in rows]
        number = sum(counts)
        share = sum(c * s for c, s in zip(counts, solved, strict=True)) / max(number, 1)
        table.add_row(tier, f"{number:,}", f"{number / total:.0%}", f"{share:.0%}")
    table.add_row("all", f"{total:,}", "100%", f"{_mean(rows, 'reward/solved_frac'):.0%}")
    hopeless = sum(row["icl/hopeless_prompts"] for row in rows)
    if hopeless:
        flipped = sum(row["icl/flipped_prompts"] for row in rows)
        seeded = sum(row["icl/seeded_rollouts"] for row in rows)
        table.caption = (
            f"{seeded:,} seeded rollouts; {flipped:,} of {hopeless:,} hopeless prompts "
            f"({flipped / hopeless:.0%}) were solved in a later round of their step"
        )
    return table


def time_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Median seconds per step and phase."""
    table = Table(title="Seconds per step (median)", title_justify="left")
    for column in ("phase", "seconds", "share"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    names = [key for key in rows[0] if key.startswith("timing_s/")]
    medians = {name: sorted(row[name] for row in rows)[len(rows) // 2] for name in names}
    step_s = medians["timing_s/step"]
    for name, seconds in medians.items():
        table.add_row(name.removeprefix("timing_s/"), f"{seconds:.4f}", f"{seconds / step_s:.1%}")
    return table


def curve_text(points: Sequence[tuple[int, float]]) -> str:
    """The learning curve in block characters, accuracy 0 to 1 upwards."""
    if len(points) < 2:
        return ""
    steps = [step for step, _ in points]
    span = max(steps[-1] - steps[0], 1)
    columns = []
    for column in range(CURVE_WIDTH):
        at = steps[0] + span * column / (CURVE_WIDTH - 1)
        columns.append(_interpolate(points, at))
    lines = []
    for level in range(CURVE_HEIGHT, 0, -1):
        cells = "".join(_block(value * CURVE_HEIGHT - (level - 1)) for value in columns)
        lines.append(f"{level / CURVE_HEIGHT:4.1f} |{cells}")
    lines.append(f"     +{'-' * CURVE_WIDTH}")
    lines.append(
        f"      step {steps[0]}{str(steps[-1]).rjust(CURVE_WIDTH - 6 - len(str(steps[0])))}"
    )
    return "\n".join(lines)


def _interpolate(points: Sequence[tuple[int, float]], at: float) -> float:
    for (left, low), (right, high) in itertools.pairwise(points):
        if at <= right:
            return low + (high - low) * (at - left) / max(right - left, 1)
    return points[-1][1]


def _block(fill: float) -> str:
    return " ▁▂▃▄▅▆▇█"[max(0, min(8, round(fill * 8)))]


def save_curve(
    path: Path, evals: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], name: str
) -> None:
    """learning_curve.png: held-out accuracy with its interval, and training reward."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [row["step"] for row in steps],
        [row["reward/mean"] for row in steps],
        color="0.75",
        linewidth=1,
        label="training reward",
    )
    key = f"eval/{name}/pass@1"
    x = [row["step"] for row in evals]
    axes.fill_between(
        x,
        [row[f"{key}/low"] for row in evals],
        [row[f"{key}/high"] for row in evals],
        color="tab:blue",
        alpha=0.15,
        linewidth=0,
    )
    axes.plot(x, [row[key] for row in evals], color="tab:blue", marker="o", label="held-out pass@1")
    axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)

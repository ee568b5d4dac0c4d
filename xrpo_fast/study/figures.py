"""Pictures of a study: learning curves, and dots with intervals for everything else."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from xrpo_fast.report.charts import MUTED, RUN_COLOURS, STYLE
from xrpo_fast.study.dots import Dot, dot_panels, heading, panel_title
from xrpo_fast.study.measure import MECHANISMS, Measured
from xrpo_fast.study.resampling import Estimate
from xrpo_fast.study.results import FEW_SEEDS, ArmResult, Results
from xrpo_fast.study.tables import name_of

REFERENCE_COLOUR, OTHER_COLOUR, BETTER_COLOUR = RUN_COLOURS[0], RUN_COLOURS[1], RUN_COLOURS[2]
MOST_ARMS_ON_ONE_AXIS = 5
DPI = 160
MOST_PUSHES = 200
SHOWN_TIERS = ("tier/vhard",)
SHARES = ("dead_groups", "flipped")
SHOWN_MECHANISMS = ("dead_groups", "flipped", "gini", "answer_tokens", "grad_norm")


def save_figures(results: Results, folder: Path) -> list[Path]:
    """All figures as PNG; those without anything to show are left out."""
    with rc_context({**STYLE, "savefig.transparent": False}):
        made = {
            "learning_curves": learning_curves(results),
            "steps_to_target": steps_to_target(results),
            "final": final_differences(results),
            "mechanisms": mechanisms(results),
        }
        paths = []
        for name, figure in made.items():
            path = folder / f"{name}.png"
            if figure is None:
                # A picture of an earlier call would show what is no longer so.
                path.unlink(missing_ok=True)
                continue
            figure.savefig(path, dpi=DPI, facecolor="white")
            paths.append(path)
    return paths


def learning_curves(results: Results) -> Figure:
    """Mean over seeds with the seeds' range: on one axis, or where there are many arms, each
    beside the reference."""
    others = [arm for arm in results.arms if arm.name != results.reference]
    if len(results.arms) <= MOST_ARMS_ON_ONE_AXIS:
        return _curves_on_one_axis(results)
    num_columns = min(4, len(others))
    num_rows = -(-len(others) // num_columns)
    figure = Figure(figsize=(2.9 * num_columns, 2.2 * num_rows + 1.0), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    reference = next((arm for arm in results.arms if arm.name == results.reference), None)
    for axis, arm in zip(grid.flat, others, strict=False):
        if reference is not None:
            # Of the arm's seeds alone: others may be easier or harder.
            _curve(axis, [run for run in reference.runs if run.seed in arm.seeds], REFERENCE_COLOUR)
        _curve(axis, arm.runs, OTHER_COLOUR)
        panel_title(axis, arm.name, _seeds_text(arm))
        _accuracy_axis(axis, results)
    for axis in grid.flat[len(others) :]:
        axis.set_visible(False)
    for axis in list(grid.flat)[: len(others)][-num_columns:]:
        axis.xaxis.set_tick_params(labelbottom=True)
        axis.set_xlabel("step")
    heading(
        figure,
        f"Held-out accuracy: each arm (orange) beside {results.reference} (blue)",
        "mean over seeds, band from the lowest to the highest seed",
    )
    return figure


def steps_to_target(results: Results) -> Figure | None:
    """Steps to each target; what was not reached as an arrow from the last step."""
    panels = []
    for target in results.targets:
        found = {arm.name: arm.costs["steps"][target] for arm in results.arms}
        if all(not c.is_reached for cost in found.values() for c in cost.by_seed.values()):
            continue
        dots = {
            name: Dot(
                mean=cost.mean,
                low=cost.low,
                high=cost.high,
                seeds=[c.value for c in cost.by_seed.values()],
                colour=_colour(name, results),
                is_bound=cost.is_bound,
            )
            for name, cost in found.items()
        }
        panels.append((f"to {target}", dots))
    if not panels:
        return None
    figure, axes = dot_panels(_labels(results), panels)
    for axis in axes:
        axis.set_xlim(0, 1.1 * results.num_steps)
        axis.set_xlabel("steps")
    heading(
        figure,
        "Steps to a held-out accuracy",
        "mean over seeds with 95 % interval, small dots: seeds; hollow with an arrow: not reached "
        "in all seeds",
    )
    return figure


def final_differences(results: Results) -> Figure | None:
    """Final accuracies minus the reference's, paired by seed."""
    others = [arm for arm in results.arms if arm.differences]
    names = [name for name in results.final_names if any(name in a.differences for a in others)]
    shown = [n for n in names if not n.startswith("tier/") or n in SHOWN_TIERS]
    panels = [
        (
            name_of(name),
            {
                arm.name: Dot(
                    mean=gap.mean,
                    low=gap.low,
                    high=gap.high,
                    seeds=list(gap.by_seed.values()),
                    colour=_sign_colour(gap),
                )
                for arm in others
                if (gap := arm.differences.get(name)) is not None
            },
        )
        for name in shown
    ]
    if not panels:
        return None
    figure, axes = dot_panels(_labels(results), panels, share_x=True)
    for axis in axes:
        axis.axvline(0, color=MUTED, linewidth=1, zorder=1)
        axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
        axis.set_xlabel("percentage points")
    heading(
        figure,
        f"After {results.num_steps} steps: accuracy minus {results.reference}'s",
        "paired by seed, mean with 95 % interval, small dots: seeds; grey: the interval holds 0, "
        f"or fewer than {FEW_SEEDS} seeds",
    )
    return figure


def mechanisms(results: Results) -> Figure | None:
    """What went on in training, arm by arm."""
    panels = [
        (
            MECHANISMS[name],
            {
                arm.name: Dot(
                    mean=found.mean,
                    low=found.low,
                    high=found.high,
                    seeds=list(found.by_seed.values()),
                    colour=_colour(arm.name, results),
                )
                for arm in results.arms
                if (found := arm.mechanisms.get(name)) is not None
            },
        )
        for name in SHOWN_MECHANISMS
    ]
    panels = [(title, dots) for title, dots in panels if dots]
    if not panels:
        return None
    figure, axes = dot_panels(_labels(results), panels)
    for axis, (title, dots) in zip(axes, panels, strict=True):
        # From 0, or a difference of nothing would look like one.
        axis.set_xlim(0, 1.08 * max(max(dot.seeds) for dot in dots.values()) or 1)
        if title in {MECHANISMS[name] for name in SHARES}:
            axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    heading(
        figure,
        "What went on in training",
        "means over all steps (answer length: at the end), with 95 % interval over seeds",
    )
    return figure


def _curves_on_one_axis(results: Results) -> Figure:
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axis = figure.subplots()
    labels = _labels(results)
    ends = []
    for index, arm in enumerate(results.arms):
        colour = RUN_COLOURS[index]
        _curve(axis, arm.runs, colour)
        ends.append((arm.final["pass@1"].mean, labels[arm.name], colour))
    _accuracy_axis(axis, results)
    axis.set_xlabel("step")
    for y, (_, name, colour) in zip(_spread([end[0] for end in ends]), ends, strict=True):
        axis.annotate(
            name,
            (results.num_steps, y),
            (6, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            annotation_clip=False,
        )
    heading(
        figure,
        "Held-out accuracy",
        "mean over seeds, band from the lowest to the highest seed",
    )
    return figure


def _spread(values: Sequence[float], gap: float = 0.05) -> list[float]:
    """Heights of labels near the values, at least `gap` apart: those too near push each other."""
    order = np.argsort(values)
    placed = np.array(values, dtype=np.float64)[order]
    for _ in range(MOST_PUSHES):
        lacking = np.maximum(gap - np.diff(placed), 0)
        placed[:-1] -= lacking / 2
        placed[1:] += lacking / 2
    spread = np.empty_like(placed)
    spread[order] = placed
    return spread.tolist()


def _curve(axis: Axes, runs: Sequence[Measured], colour: str) -> None:
    """Mean and range of some seeds of one arm; nothing where there are none."""
    if not runs:
        return
    values = np.array([run.accuracy for run in runs])
    axis.fill_between(
        runs[0].steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.14, linewidth=0
    )
    axis.plot(runs[0].steps, values.mean(axis=0), color=colour)


def _accuracy_axis(axis: Axes, results: Results) -> None:
    axis.set_ylim(0, 1.0)
    axis.set_xlim(0, results.num_steps)
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _seeds_text(arm: ArmResult) -> str:
    return f"{len(arm.runs)} seed{'s' if len(arm.runs) > 1 else ''}"


def _labels(results: Results) -> dict[str, str]:
    """Arms by name; those with fewer seeds than others, with their number."""
    most = max(len(arm.runs) for arm in results.arms)
    return {
        arm.name: arm.name if len(arm.runs) == most else f"{arm.name}, {_seeds_text(arm)}"
        for arm in results.arms
    }


def _colour(name: str, results: Results) -> str:
    return REFERENCE_COLOUR if name == results.reference else OTHER_COLOUR


def _sign_colour(gap: Estimate) -> str:
    """Whether the interval lies to one side of 0; of few seeds' intervals many do by chance."""
    if gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
        return MUTED
    if len(gap.by_seed) < FEW_SEEDS:
        return MUTED
    return BETTER_COLOUR if gap.low > 0 else OTHER_COLOUR

"""Pictures of a study: learning curves, and dots with intervals for everything else."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from xrpo_fast.report.charts import GRID, INK, MUTED, RUN_COLOURS, STYLE
from xrpo_fast.study.measure import MECHANISMS
from xrpo_fast.study.results import ArmResult, Results
from xrpo_fast.study.tables import name_of

REFERENCE_COLOUR, OTHER_COLOUR, BETTER_COLOUR = RUN_COLOURS[0], RUN_COLOURS[1], RUN_COLOURS[2]
MOST_ARMS_ON_ONE_AXIS = 5
DPI = 160
SHOWN_MECHANISMS = ("dead_groups", "flipped", "gini", "answer_tokens", "grad_norm")


@dataclass(kw_only=True, slots=True)
class Dot:
    """One arm in one panel: its mean, interval and seeds."""

    mean: float
    low: float | None
    high: float | None
    seeds: Sequence[float]
    colour: str
    is_bound: bool = False
    """The mean is a lower bound: drawn hollow, with an arrow."""


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
    figure = Figure(figsize=(2.9 * num_columns, 2.25 * num_rows + 0.7), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    reference = next((arm for arm in results.arms if arm.name == results.reference), None)
    for axis, arm in zip(grid.flat, others, strict=False):
        if reference is not None:
            _curve(axis, reference, REFERENCE_COLOUR)
        _curve(axis, arm, OTHER_COLOUR)
        _title(axis, arm.name, _seeds_text(arm))
        _accuracy_axis(axis, results)
    for axis in grid.flat[len(others) :]:
        axis.set_visible(False)
    for axis in grid[-1]:
        axis.set_xlabel("step")
    for axis in list(grid.flat)[: len(others)][-num_columns:]:
        axis.xaxis.set_tick_params(labelbottom=True)
    _heading(
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
    figure, axes = _panels(results, panels)
    for axis in axes:
        axis.set_xlim(0, 1.1 * results.num_steps)
        axis.set_xlabel("steps")
    _heading(
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
    shown = [name for name in names if not name.startswith("tier/")]
    shown += [name for name in names if name in ("tier/vhard", "tier/chain")]
    panels = [
        (
            name_of(name),
            {
                arm.name: Dot(
                    mean=gap.mean,
                    low=gap.low,
                    high=gap.high,
                    seeds=list(gap.by_seed.values()),
                    colour=_sign_colour(gap.low, gap.high),
                )
                for arm in others
                if (gap := arm.differences.get(name)) is not None
            },
        )
        for name in shown
    ]
    if not panels:
        return None
    figure, axes = _panels(results, panels)
    for axis in axes:
        axis.axvline(0, color=REFERENCE_COLOUR, linewidth=1.2, zorder=1)
        axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
        axis.set_xlabel("points")
    _heading(
        figure,
        f"After {results.num_steps} steps: accuracy minus {results.reference}'s",
        "paired by seed, mean with 95 % interval, small dots: seeds; grey: the interval holds 0",
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
    figure, axes = _panels(results, panels)
    for axis in axes:
        axis.set_xlim(left=0)
    _heading(
        figure,
        "What went on in training",
        "means over all steps (answer length: at the end), with 95 % interval over seeds",
    )
    return figure


def _panels(
    results: Results, panels: Sequence[tuple[str, dict[str, Dot]]]
) -> tuple[Figure, list[Axes]]:
    """Panels side by side, one row per arm in all of them."""
    names = [arm.name for arm in results.arms if any(arm.name in dots for _, dots in panels)]
    figure = Figure(
        figsize=(1.2 + 2.3 * len(panels), 1.25 + 0.3 * len(names)), layout="constrained"
    )
    axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False).flat)
    for axis, (title, dots) in zip(axes, panels, strict=True):
        for place, name in enumerate(names):
            if name in dots:
                _draw_dot(axis, place, dots[name])
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.set_yticks(range(len(names)), names)
        axis.tick_params(axis="y", labelcolor=INK)
        axis.grid(axis="x", color=GRID)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4))
        _title(axis, title)
    return figure, axes


def _draw_dot(axis: Axes, place: int, dot: Dot) -> None:
    axis.plot(
        dot.seeds,
        [place] * len(dot.seeds),
        "o",
        color=dot.colour,
        alpha=0.35,
        markersize=3,
        markeredgewidth=0,
        zorder=2,
    )
    if dot.low is not None:
        high = dot.mean if dot.high is None else dot.high
        axis.plot([dot.low, high], [place, place], color=dot.colour, linewidth=1.6, zorder=3)
    axis.plot(
        dot.mean,
        place,
        "o",
        markersize=6.5,
        zorder=4,
        markeredgecolor=dot.colour if dot.is_bound else "white",
        markerfacecolor="white" if dot.is_bound else dot.colour,
    )
    if dot.is_bound:
        axis.annotate(
            "",
            (dot.mean, place),
            (16, 0),
            textcoords="offset points",
            arrowprops={"arrowstyle": "<-", "color": dot.colour, "shrinkA": 0, "shrinkB": 3},
        )


def _curves_on_one_axis(results: Results) -> Figure:
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axis = figure.subplots()
    ends = []
    for index, arm in enumerate(results.arms):
        colour = RUN_COLOURS[index]
        _curve(axis, arm, colour)
        ends.append((float(_accuracy(arm)[:, -1].mean()), arm.name, colour))
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
    _heading(
        figure,
        "Held-out accuracy",
        "mean over seeds, band from the lowest to the highest seed",
    )
    return figure


def _spread(values: Sequence[float], gap: float = 0.05) -> list[float]:
    """Heights of labels near the values, at least `gap` apart."""
    order = np.argsort(values)
    placed = np.array(values, dtype=np.float64)
    for below, above in itertools.pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    # Half of what the pile has grown by, so that it stands around its values.
    return (placed - (placed - np.array(values)).max() / 2).tolist()


def _accuracy(arm: ArmResult) -> np.ndarray:
    """(seeds, evaluations) accuracies."""
    return np.array([run.accuracy for run in arm.runs])


def _curve(axis: Axes, arm: ArmResult, colour: str) -> None:
    values = _accuracy(arm)
    steps = arm.runs[0].steps
    axis.fill_between(
        steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.14, linewidth=0
    )
    axis.plot(steps, values.mean(axis=0), color=colour)


def _accuracy_axis(axis: Axes, results: Results) -> None:
    axis.set_ylim(0, 1.0)
    axis.set_xlim(0, results.num_steps)
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _title(axis: Axes, text: str, aside: str = "") -> None:
    axis.set_title(text, loc="left", fontsize=10, color=INK, pad=6)
    if aside:
        axis.set_title(aside, loc="right", fontsize=8, color=MUTED, pad=6)


def _seeds_text(arm: ArmResult) -> str:
    return f"{len(arm.runs)} seed{'s' if len(arm.runs) > 1 else ''}"


def _heading(figure: Figure, title: str, subtitle: str) -> None:
    """Two lines at the top left, above everything."""
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12.5, color=INK)
    height = figure.get_size_inches()[1]
    figure.text(0.01, 1 - 0.36 / height, subtitle, ha="left", va="top", fontsize=8.5, color=MUTED)


def _colour(name: str, results: Results) -> str:
    return REFERENCE_COLOUR if name == results.reference else OTHER_COLOUR


def _sign_colour(low: float | None, high: float | None) -> str:
    """Whether the interval lies to one side of 0."""
    if low is None or high is None or low <= 0 <= high:
        return MUTED
    return BETTER_COLOUR if low > 0 else OTHER_COLOUR

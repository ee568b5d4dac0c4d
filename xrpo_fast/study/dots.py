"""Dots with intervals, one row per arm, and the headings that all figures share."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from xrpo_fast.report.charts import GRID, INK, MUTED

TITLE_CHARACTERS = 26
HEADING_IN = 0.62
"""Height of the two lines above the panels."""


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


def dot_panels(
    labels: Mapping[str, str],
    panels: Sequence[tuple[str, dict[str, Dot]]],
    *,
    share_x: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Panels side by side, one row per arm in all of them; labels: of the arms, in order."""
    names = [arm for arm in labels if any(arm in dots for _, dots in panels)]
    figure = Figure(figsize=(1.3 + 2.4 * len(panels), 1.5 + 0.3 * len(names)), layout="constrained")
    axes = list(figure.subplots(1, len(panels), sharex=share_x, sharey=True, squeeze=False).flat)
    for axis, (title, dots) in zip(axes, panels, strict=True):
        for place, name in enumerate(names):
            if name in dots:
                _draw_dot(axis, place, dots[name])
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.set_yticks(range(len(names)), [labels[name] for name in names])
        axis.tick_params(axis="y", labelcolor=INK)
        axis.grid(axis="x", color=GRID)
        axis.margins(x=0.08)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
        panel_title(axis, textwrap.fill(title, TITLE_CHARACTERS))
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
        axis.plot([dot.low, high], [place, place], color=dot.colour, linewidth=2, zorder=3)
    axis.plot(
        dot.mean,
        place,
        "o",
        markersize=6,
        zorder=4,
        clip_on=False,
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


def panel_title(axis: Axes, text: str, aside: str = "") -> None:
    """At the left above a panel; the aside at its right."""
    axis.set_title(text, loc="left", fontsize=10, color=INK, pad=6)
    if aside:
        axis.set_title(aside, loc="right", fontsize=8, color=MUTED, pad=6)


def heading(figure: Figure, title: str, subtitle: str) -> None:
    """Two lines at the top left, above everything; called when the panels are there."""
    height = figure.get_size_inches()[1]
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, 0, 1, 1 - HEADING_IN / height))  # pyright: ignore[reportCallIssue]
    figure.text(0.01, 1 - 0.1 / height, title, va="top", fontsize=12.5, color=INK)
    figure.text(0.01, 1 - 0.36 / height, subtitle, va="top", fontsize=8.5, color=MUTED)

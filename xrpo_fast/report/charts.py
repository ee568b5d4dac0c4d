"""The look of the charts: colours, axes, curves; figure -> SVG that follows the page's theme."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1b1f24", "#666d76", "#e3e6ea"
RUN_COLOURS = (
    "#2563d9",
    "#d4541a",
    "#0d8868",
    "#a23bb3",
    "#a87b00",
    "#cf2f66",
    "#4d6478",
    "#7d5230",
)
"""One per run. In an SVG each becomes a CSS variable, so that the dark theme can lighten it."""
PART_COLOURS = (
    "#3f6fb5",
    "#6aa6a0",
    "#c98b4a",
    "#8a6fb0",
    "#b5607f",
    "#8f9f3f",
    "#9aa3ad",
    "#c4cad1",
)
"""Parts of a whole, such as phases of a step."""
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    **{colour: f"run-{i}" for i, colour in enumerate(RUN_COLOURS)},
    **{colour: f"part-{i}" for i, colour in enumerate(PART_COLOURS)},
}

WIDTH_IN, HEIGHT_IN = 4.4, 2.5
# Across the page: as many points per pixel as the small charts, so that text is of one size.
WIDE_IN = 12.2
_MARGINS_IN = (0.42, 0.1, 0.46, 0.14)
"""Left (tick labels), right, bottom (tick labels and axis label), top (power of ten)."""
# Steps averaged for the firm line: noise of single steps hides the trend.
SMOOTHED_FRAC = 0.05

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-3, 5),
    "axes.xmargin": 0.01,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "savefig.transparent": True,
}


@dataclass(kw_only=True, slots=True)
class Chart:
    """A picture and the words that go with it."""

    name: str
    """File name of the PNG and anchor in the page."""
    title: str
    caption: str
    figure: Figure
    is_wide: bool = False
    legend: Sequence[tuple[str, str]] = ()
    """Colours and labels beside those of the runs."""


def colour(run_index: int) -> str:
    """Accent of a run; repeats after eight."""
    return RUN_COLOURS[run_index % len(RUN_COLOURS)]


@contextmanager
def canvas(
    *, height: float = HEIGHT_IN, width: float = WIDTH_IN, x_label: str = "step"
) -> Iterator[tuple[Figure, Axes]]:
    """A styled figure and its axes, which stand at the same place in all charts."""
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        left, right, bottom, top = _MARGINS_IN
        figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
        axis = figure.subplots()
        yield figure, axis
        axis.set_xlabel(x_label)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean over `window` values, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    begin = np.maximum(places - window // 2, 0)
    end = np.minimum(places + (window + 1) // 2, len(values))
    return (sums[end] - sums[begin]) / (end - begin)


def smoothing_window(num_steps: int) -> int:
    """Odd number of steps that the firm line averages."""
    return max(1, round(SMOOTHED_FRAC * num_steps)) // 2 * 2 + 1


def draw_noisy(axis: Axes, steps: np.ndarray, values: np.ndarray, run_index: int) -> None:
    """A metric logged each step: faint as logged, firm as a running mean."""
    window = smoothing_window(len(steps))
    if window > 1:
        axis.plot(steps, values, color=colour(run_index), alpha=0.22, linewidth=0.9)
    axis.plot(steps, smooth(values, window), color=colour(run_index))


def draw_interval(
    axis: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    run_index: int,
) -> None:
    """A metric with its interval as a band."""
    axis.fill_between(steps, low, high, color=colour(run_index), alpha=0.13, linewidth=0)
    axis.plot(steps, values, color=colour(run_index), marker="o", markersize=3.2)


def frame(axis: Axes, values: Sequence[np.ndarray]) -> None:
    """Limits of y: from 0 where values come near it, and never a magnified rounding error."""
    whole = np.concatenate(values)
    low, high = float(whole.min()), float(whole.max())
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        axis.set_ylim(min(0.0, 1.5 * low), max(1.5 * high, 0.0 if low < 0 else 1e-9) or 1.0)
        if high == low == 0:
            axis.set_ylim(0, 1)
    elif 0 <= low < 0.5 * high:
        axis.set_ylim(0, 1.06 * high)


def to_svg(chart: Chart) -> str:
    """Inline SVG: scales with the page, takes its colours and font from the page's style."""
    buffer = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": chart.name}):
        chart.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # Group ids repeat from chart to chart; those that clip paths and markers refer to are salted.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for value, variable in VARIABLES.items():
        svg = svg.replace(value, f"var(--{variable})")
    return svg


def save_png(chart: Chart, folder: Path) -> None:
    """The chart in the light theme's colours, on white."""
    with rc_context({**STYLE, "savefig.transparent": False}):
        chart.figure.savefig(folder / f"{chart.name}.png", dpi=130, facecolor="white")

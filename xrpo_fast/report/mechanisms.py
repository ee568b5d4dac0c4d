"""Charts of XRPO's mechanisms: where rollouts went, seeding, novelty; and where time went."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from xrpo_fast.report.charts import (
    PART_COLOURS,
    WIDE_IN,
    Chart,
    canvas,
    colour,
    smooth,
    smoothing_window,
)
from xrpo_fast.report.learning import metric_chart
from xrpo_fast.report.runs import Run

MAP_ROWS, MAP_COLUMNS = 24, 60
# Fewer visits per cell would show the data order, not the planner.
_VISITS_PER_CELL = 2.5
_PASS_RATE_BINS = np.array([0.0, 1e-9, 0.2, 0.4, 0.6, 0.8, 1 - 1e-9, 1.0 + 1e-9])
_PASS_RATE_LABELS = ("0", "<.2", ".2-.4", ".4-.6", ".6-.8", ">.8", "1")
_NUM_QUANTILES = 12
_NUM_SIMILARITY_BINS = 25

PHASE_GROUPS = {
    "generate": ("generate",),
    "update": ("update",),
    "verify": ("verify",),
    "log-probs": ("logprob",),
    "weights and saving": ("sync", "save"),
    "planning, retrieval, advantages": ("plan", "retrieve", "advantage"),
    "idle at barriers": ("barrier_idle",),
    "other": ("other",),
}


def rollout_charts(runs: Sequence[Run]) -> list[Chart]:
    """Rollouts by pass rate, spread over prompts, and one map per run."""
    charts = [
        _by_pass_rate(runs),
        metric_chart(
            runs,
            "planner/gini",
            "Inequality of the plan",
            "Gini coefficient of rollouts per prompt; 0: all prompts get the same",
        ),
    ]
    visits = {index: _visits(run) for index, run in enumerate(runs) if run.has_rollouts}
    most = max((v["rollouts"].max() for v in visits.values()), default=0)
    charts += [
        _rollout_map(runs[index], index, seen, most)
        for index, seen in visits.items()
        if np.ptp(seen["rollouts"])
    ]
    return [chart for chart in charts if chart]


def _visits(run: Run) -> dict[str, np.ndarray]:
    """One row per (step, prompt): step, prompt_index, rollouts, and pass rate of the base."""
    columns = run.rollouts
    keys = np.stack([columns["step"], columns["prompt_index"]], axis=1).astype(np.int64)
    visits, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.ravel()
    is_base = (columns["round"] == 0) & ~columns["seeded"].astype(bool)
    num_base = np.bincount(which, weights=is_base)
    num_right = np.bincount(which, weights=is_base & columns["solved"].astype(bool))
    return {
        "step": visits[:, 0],
        "prompt_index": visits[:, 1],
        "rollouts": np.bincount(which),
        "pass_rate": num_right / np.maximum(num_base, 1),
    }


def _by_pass_rate(runs: Sequence[Run]) -> Chart | None:
    if not any(run.has_rollouts for run in runs):
        return None
    places = np.arange(len(_PASS_RATE_LABELS))
    with canvas(x_label="pass rate of the first rollouts") as (figure, axis):
        for index, run in enumerate(runs):
            if not run.has_rollouts:
                continue
            visits = _visits(run)
            bins = np.digitize(visits["pass_rate"], _PASS_RATE_BINS) - 1
            counts = np.bincount(bins, minlength=len(places))
            sums = np.bincount(bins, weights=visits["rollouts"], minlength=len(places))
            seen = counts > 0
            means = sums[seen] / counts[seen]
            axis.plot(places[seen], means, color=colour(index), marker="o", markersize=4)
        axis.set_xticks(places, _PASS_RATE_LABELS)
        axis.set_ylim(bottom=0)
    return Chart(
        name="rollouts_by_pass_rate",
        title="Rollouts per prompt",
        caption="mean in a step, by the share of the prompt's first rollouts that were right",
        figure=figure,
    )


def _rollout_map(run: Run, index: int, visits: dict[str, np.ndarray], most: int) -> Chart:
    """Prompt x step; prompts ordered by pass rate, both axes in bins; full colour at `most`."""
    prompts, which = np.unique(visits["prompt_index"], return_inverse=True)
    rates = np.bincount(which, weights=visits["pass_rate"]) / np.bincount(which)
    rank = np.empty(len(prompts), np.int64)
    rank[np.argsort(rates, kind="stable")] = np.arange(len(prompts))
    num_rows = min(MAP_ROWS, len(prompts))
    num_visits = len(visits["step"])
    num_columns = int(np.clip(num_visits / (num_rows * _VISITS_PER_CELL), 1, MAP_COLUMNS))
    num_columns = min(num_columns, run.num_steps)
    rows = rank[which] * num_rows // len(prompts)
    columns = (visits["step"] - 1) * num_columns // run.num_steps
    cells = rows * num_columns + columns
    counts = np.bincount(cells, minlength=num_rows * num_columns)
    sums = np.bincount(cells, weights=visits["rollouts"], minlength=num_rows * num_columns)
    means = np.where(counts, sums / np.maximum(counts, 1), np.nan).reshape(num_rows, num_columns)
    with canvas(height=3.6, width=WIDE_IN) as (figure, axis):
        image = np.empty((num_rows, num_columns, 4))
        image[..., :3] = to_rgb(colour(index))
        image[..., 3] = np.nan_to_num(means / most)
        axis.imshow(
            image,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            extent=(0.5, run.num_steps + 0.5, 0, 1),
        )
        axis.grid(False)
        heights = np.linspace(0, 1, 5)
        levels = np.quantile(rates, heights)
        axis.set_yticks(heights, [f"{level:.2f}" for level in levels])
        axis.set_ylabel("pass rate of the prompt")
    return Chart(
        name=f"rollout_map_{index}",
        title=f"Where the rollouts of {run.name} went",
        caption=(
            f"prompts in order of pass rate against steps; {np.nanmin(means):.1f} (faint) to "
            f"{np.nanmax(means):.1f} rollouts per visit; blank: not drawn"
        ),
        figure=figure,
        is_wide=True,
    )


def seeding_charts(runs: Sequence[Run]) -> list[Chart]:
    """Seeded and flipped prompts, success of seeded rollouts, corpus, similarity."""
    wanted = [
        metric_chart(
            runs,
            "icl/flipped_frac",
            "Hopeless prompts flipped",
            "share of prompts whose base rollouts all failed that were solved later in the step",
            is_fraction=True,
        ),
        metric_chart(runs, "icl/seeded_prompts", "Prompts seeded", "per step"),
        metric_chart(
            runs,
            "icl/seeded_solved_frac",
            "Seeded rollouts solved",
            "share; zero-shot, these prompts had failed",
            is_fraction=True,
        ),
        metric_chart(runs, "icl/corpus_size", "Corpus", "problems with an own success to show"),
        _similarity_histogram(runs),
    ]
    return [chart for chart in wanted if chart]


def _similarity_histogram(runs: Sequence[Run]) -> Chart | None:
    shown = {
        index: run.rollouts["similarity"][run.rollouts["seeded"].astype(bool)].astype(np.float64)
        for index, run in enumerate(runs)
        if run.has_rollouts
    }
    shown = {index: values[np.isfinite(values)] for index, values in shown.items()}
    shown = {index: values for index, values in shown.items() if len(values)}
    if not shown:
        return None
    low = min(float(values.min()) for values in shown.values())
    edges = np.linspace(min(low, 0.95), 1.0 + 1e-6, _NUM_SIMILARITY_BINS).tolist()
    with canvas(x_label="cosine") as (figure, axis):
        for index, values in shown.items():
            axis.hist(values, edges, color=colour(index), alpha=0.3)
            axis.hist(values, edges, color=colour(index), histtype="step")
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6))
    return Chart(
        name="similarity",
        title="Similarity of exemplars",
        caption="seeded rollouts by the cosine of their nearest exemplar",
        figure=figure,
    )


def novelty_charts(runs: Sequence[Run]) -> list[Chart]:
    """Bonus against length and likelihood, and over the steps."""
    wanted = [
        metric_chart(runs, "novelty/bonus_mean", "Novelty bonus", "mean per trained row"),
        _bonus_against(runs, "num_tokens", "tokens", "Bonus against length"),
        _bonus_against(runs, "score", "mean log-prob per token, nats", "Bonus against likelihood"),
    ]
    has_bonus = any(run.has_rollouts and run.rollouts["bonus"].any() for run in runs)
    return [chart for chart in wanted if chart] if has_bonus else []


def _bonus_against(runs: Sequence[Run], column: str, x_label: str, title: str) -> Chart | None:
    """Mean bonus of right answers that may get one."""
    with canvas(x_label=x_label) as (figure, axis):
        tallest = 0.0
        for index, run in enumerate(runs):
            if not run.rollouts["bonus"].any():
                continue
            rewarded = run.rollouts["solved"].astype(bool) & (run.rollouts["advantage"] > 0)
            rewarded &= ~run.rollouts["seeded"].astype(bool)
            x, y = run.rollouts[column][rewarded], run.rollouts["bonus"][rewarded]
            is_finite = np.isfinite(x) & np.isfinite(y)
            x, y = x[is_finite], y[is_finite]
            if not len(x):
                continue
            centres, means = _binned(x, y)
            axis.plot(centres, means, color=colour(index), marker="o", markersize=4)
            tallest = max(tallest, float(means.max()))
        axis.set_ylim(0, 1.06 * tallest or 1)
    if not tallest:
        return None
    return Chart(
        name=f"bonus_against_{column}",
        title=title,
        caption="mean of unseeded right answers with a positive advantage; at most 12 groups",
        figure=figure,
    )


def _binned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of x and y in groups of equal number; per value where x has few values."""
    edges = np.unique(x)
    if len(edges) > _NUM_QUANTILES:
        edges = np.unique(np.quantile(x, np.linspace(0, 1, _NUM_QUANTILES + 1)[:-1]))
    bins = np.searchsorted(edges, x, side="right") - 1
    counts = np.bincount(bins)
    # Between two quantiles that lie close there may be no value at all.
    filled = counts > 0
    x_sums, y_sums = np.bincount(bins, weights=x), np.bincount(bins, weights=y)
    return x_sums[filled] / counts[filled], y_sums[filled] / counts[filled]


def time_charts(runs: Sequence[Run]) -> list[Chart]:
    """Seconds per phase of a step as a stacked area, one chart per run."""
    return [chart for index, run in enumerate(runs) if (chart := _time_chart(run, index))]


def _time_chart(run: Run, index: int) -> Chart | None:
    rows = [row for row in run.rows if isinstance(row.get("timing_s/step"), int | float)]
    if not rows:
        return None
    steps = np.array([row["step"] for row in rows])
    window = smoothing_window(len(rows))
    layers, legend = [], []
    for (label, phases), shade in zip(PHASE_GROUPS.items(), PART_COLOURS, strict=True):
        seconds = np.array([sum(row.get(f"timing_s/{p}") or 0.0 for p in phases) for row in rows])
        if seconds.sum() > 0:
            layers.append((smooth(seconds, window), shade))
            share = seconds.sum() / sum(row["timing_s/step"] for row in rows)
            legend.append((shade, f"{label} {share:.1%}"))
    with canvas(height=3.4, width=WIDE_IN) as (figure, axis):
        axis.stackplot(
            steps,
            [seconds for seconds, _ in layers],
            colors=[shade for _, shade in layers],
            linewidth=0,
        )
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, steps=[1, 2, 5, 10]))
    return Chart(
        name=f"time_{index}",
        title=f"Seconds per step of {run.name}",
        caption=f"mean of {window} steps; below: share of the seconds of all steps",
        figure=figure,
        is_wide=True,
        legend=legend,
    )

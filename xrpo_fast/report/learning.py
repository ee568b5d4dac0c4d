"""Charts of what was learnt: accuracy, reward, lengths, health of the optimisation."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from xrpo_fast.report.charts import (
    Chart,
    canvas,
    colour,
    draw_interval,
    draw_noisy,
    frame,
    smoothing_window,
)
from xrpo_fast.report.runs import Run


def accuracy_charts(runs: Sequence[Run]) -> list[Chart]:
    """pass@1 of each evaluation set, with its bootstrap interval."""
    charts = []
    for name in runs[0].eval_sets():
        key = f"eval/{name}/pass@1"
        with canvas() as (figure, axis):
            for index, run in enumerate(runs):
                steps, values = run.series(key)
                low, high = run.series(f"{key}/low")[1], run.series(f"{key}/high")[1]
                if len(low) == len(high) == len(values):
                    draw_interval(axis, steps, values, low, high, index)
                else:
                    axis.plot(steps, values, color=colour(index), marker="o", markersize=3.2)
            axis.set_ylim(0, 1)
        charts.append(
            Chart(
                name=f"accuracy_{_file_name(name)}",
                title=f"Accuracy on {name}",
                caption="pass@1; band: 95 % bootstrap interval over questions and samples",
                figure=figure,
            )
        )
    return charts


def metric_chart(
    runs: Sequence[Run], key: str, title: str, caption: str, *, is_fraction: bool = False
) -> Chart | None:
    """One metric over the steps, runs overlaid; None where no run logged it."""
    logged = [(index, *run.series(key)) for index, run in enumerate(runs)]
    logged = [curve for curve in logged if len(curve[1])]
    if not logged:
        return None
    with canvas() as (figure, axis):
        for index, steps, values in logged:
            draw_noisy(axis, steps, values, index)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
        if is_fraction:
            axis.set_ylim(-0.02, 1.02)
        else:
            frame(axis, [values for _, _, values in logged])
    return Chart(name=_file_name(key), title=title, caption=caption, figure=figure)


def learning_charts(runs: Sequence[Run]) -> list[Chart]:
    """Accuracy per evaluation set, then training reward and solved share."""
    window = smoothing_window(max(run.num_steps for run in runs))
    mean = f"firm line: mean of {window} steps" if window > 1 else "one point per step"
    wanted = [
        metric_chart(runs, "reward/mean", "Training reward", f"mean per rollout; {mean}"),
        metric_chart(
            runs,
            "groups/zero_variance_frac",
            "Groups without signal",
            "share of prompts whose rollouts all got the same reward",
            is_fraction=True,
        ),
    ]
    wanted += _tier_charts(runs)
    return accuracy_charts(runs) + [chart for chart in wanted if chart]


def _tier_charts(runs: Sequence[Run]) -> list[Chart | None]:
    """pass@1 of each difficulty label of the evaluation sets."""
    keys = dict.fromkeys(key for run in runs for row in run.rows for key in row if "/tier/" in key)
    tiers = [key for key in keys if key.startswith("eval/") and key.endswith("/pass@1")]
    return [
        metric_chart(
            runs,
            key,
            f"Tier {key.split('/tier/')[1].removesuffix('/pass@1')}",
            f"pass@1 on {key.split('/tier/')[0].removeprefix('eval/')}",
            is_fraction=True,
        )
        for key in tiers
    ]


def length_charts(runs: Sequence[Run]) -> list[Chart]:
    """Response length and the share that was cut off."""
    wanted = [
        metric_chart(
            runs, "completions/mean_length", "Response length", "tokens, mean of all rollouts"
        ),
        metric_chart(
            runs,
            "completions/truncated_frac",
            "Cut off at the token limit",
            "share of rollouts",
        ),
        _length_histogram(runs),
    ]
    return [chart for chart in wanted if chart]


def _length_histogram(runs: Sequence[Run]) -> Chart | None:
    """Lengths of right and wrong answers over the last fifth of the steps."""
    recorded = [run for run in runs if run.has_rollouts]
    if not recorded:
        return None
    longest = max(int(run.rollouts["num_tokens"].max()) for run in recorded)
    edges = np.linspace(0, longest + 1, min(longest + 1, 40) + 1).tolist()
    with canvas(x_label="tokens") as (figure, axis):
        for index, run in enumerate(runs):
            if not run.has_rollouts:
                continue
            is_late = run.rollouts["step"] > 0.8 * run.num_steps
            solved = run.rollouts["solved"].astype(bool)
            tokens = run.rollouts["num_tokens"]
            weight = 1 / max(is_late.sum(), 1)
            for chosen, line in ((is_late & solved, "-"), (is_late & ~solved, ":")):
                weights = np.full(chosen.sum(), weight)
                axis.hist(
                    tokens[chosen],
                    edges,
                    weights=weights,
                    color=colour(index),
                    histtype="step",
                    linestyle=line,
                    linewidth=1.5,
                )
    return Chart(
        name="length_histogram",
        title="Lengths at the end",
        caption="share of the last fifth of the steps' rollouts; firm: right, dotted: wrong",
        figure=figure,
    )


def health_charts(runs: Sequence[Run]) -> list[Chart]:
    """Sampler against trainer, gradient, entropy, clipping."""
    wanted = [
        metric_chart(
            runs,
            "mismatch/logprob_abs_mean",
            "Log-prob mismatch",
            "mean |sampler - trainer| per token, nats; before the first update of each step",
        ),
        metric_chart(
            runs, "mismatch/logprob_abs_max", "Largest mismatch", "of a token of the step, nats"
        ),
        metric_chart(runs, "grad_norm", "Gradient norm", "before clipping"),
        metric_chart(runs, "entropy", "Entropy", "per token, nats"),
        metric_chart(runs, "clip_frac/high", "Clipped above", "share of tokens or rows"),
        metric_chart(runs, "clip_frac/low", "Clipped below", "share of tokens or rows"),
        metric_chart(runs, "kl", "KL to the reference", "per token, nats"),
    ]
    return [chart for chart in wanted if chart]


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)

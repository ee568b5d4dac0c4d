"""What stands in the report, in order."""

from collections.abc import Sequence

from xrpo_fast.report.charts import Chart
from xrpo_fast.report.learning import health_charts, learning_charts, length_charts
from xrpo_fast.report.mechanisms import (
    novelty_charts,
    rollout_charts,
    seeding_charts,
    time_charts,
)
from xrpo_fast.report.page import page_html, section_html
from xrpo_fast.report.runs import Run
from xrpo_fast.report.tables import facts_html, samples_html, summary_html


def make_report(runs: Sequence[Run]) -> tuple[str, list[Chart]]:
    """The page and its charts."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    sections = [
        (
            "Learning",
            "Held-out accuracy and what the policy was rewarded for.",
            learning_charts(runs),
            "Neither evaluation nor reward was logged.",
        ),
        (
            "Rollouts",
            "Which prompts the budget of a step went to.",
            rollout_charts(runs),
            "No rollouts were recorded.",
        ),
        (
            "Seeding",
            "Prompts whose rollouts all failed are shown the policy's own successes.",
            seeding_charts(runs),
            "No run seeded prompts.",
        ),
        (
            "Novelty",
            "Right answers that the policy found unlikely count more.",
            novelty_charts(runs),
            "No run gave a novelty bonus.",
        ),
        (
            "Lengths",
            "How long answers are, and how many hit the limit.",
            length_charts(runs),
            "No lengths were logged.",
        ),
        ("Time", "Where the seconds of a step go.", time_charts(runs), "No timings were logged."),
        (
            "Health",
            "Sampler and trainer must agree; gradients and entropy must stay in range.",
            health_charts(runs),
            "No optimisation metrics were logged.",
        ),
    ]
    body = f"<h1>{title}</h1>{facts_html(runs)}{summary_html(runs)}"
    body += "".join(section_html(*section) for section in sections)
    samples = samples_html(runs) or '<p class="missing">No texts were recorded.</p>'
    lead = (
        "The same problem early and late in training."
        if len(runs) == 1
        else "The same problem, answered last by each run."
    )
    body += f'<section><h2>Samples</h2><p class="lead">{lead}</p>{samples}</section>'
    charts = [chart for _, _, made, _ in sections for chart in made]
    return page_html(f"xrpo_fast: {title}", body), charts

"""One self-contained HTML page: no script, no network, light and dark."""

from collections.abc import Sequence
from html import escape

from xrpo_fast.report.charts import VARIABLES, Chart, to_svg
from xrpo_fast.report.style import style_css


def figure_html(chart: Chart) -> str:
    """A chart with its title, caption and legend."""
    legend = "".join(
        f'<li style="--c:var(--{VARIABLES[shade]})">{escape(label)}</li>'
        for shade, label in chart.legend
    )
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    kind = ' class="wide"' if chart.is_wide else ""
    return (
        f'<figure{kind} id="{chart.name}"><figcaption><h3>{escape(chart.title)}</h3>'
        f"<span>{escape(chart.caption)}</span></figcaption>"
        f'<div class="scroll" role="img" aria-label="{escape(chart.title)}">{to_svg(chart)}</div>'
        f"{legend}</figure>"
    )


def section_html(title: str, lead: str, charts: Sequence[Chart], missing: str) -> str:
    """A heading and its charts, or a sentence that says why there are none."""
    body = "".join(map(figure_html, charts))
    body = (
        f'<div class="charts">{body}</div>' if body else f'<p class="missing">{escape(missing)}</p>'
    )
    return f'<section><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{body}</section>'


def page_html(title: str, body: str) -> str:
    """The whole document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_css()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )

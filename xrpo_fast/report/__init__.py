"""Pictures of training runs: python -m xrpo_fast.report RUN_DIR... [-o report.html]"""

from collections.abc import Sequence
from pathlib import Path

from xrpo_fast.report.runs import ReportError

__all__ = ["ReportError", "write_report"]


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Writes one self-contained HTML page about one or several runs of one task.

    Each chart is also saved as PNG, in a folder beside the page: report.html -> report_figures/.

    Returns:
        The page's path.
    Raises:
        ReportError: an unreadable run folder, or runs of different tasks.
    """
    from xrpo_fast.report.charts import save_png
    from xrpo_fast.report.contents import make_report
    from xrpo_fast.report.runs import load_runs

    html, charts = make_report(load_runs(run_dirs))
    folder = out.with_name(f"{out.stem}_figures")
    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        save_png(chart, folder)
    part = out.with_name(f".{out.name}.part")
    part.write_text(html, encoding="utf-8")
    part.replace(out)
    return out

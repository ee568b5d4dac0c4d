"""python -m xrpo_fast.report RUN_DIR... [-o report.html]"""

import argparse
import sys
from pathlib import Path

from xrpo_fast.report import ReportError, write_report


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, or 2 where a run folder cannot be shown."""
    parser = argparse.ArgumentParser(prog="python -m xrpo_fast.report", description=__doc__)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "-o", "--out", type=Path, help="page to write (report.html: of one run in its folder)"
    )
    options = parser.parse_args(arguments)
    folder = options.run_dirs[0] if len(options.run_dirs) == 1 else Path()
    out = options.out or folder / "report.html"
    try:
        print(write_report(options.run_dirs, out))
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out: expected to write {out}, got {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

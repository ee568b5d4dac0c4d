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
        "-o", "--out", type=Path, default=Path("report.html"), help="page to write (%(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run_dirs, options.out))
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

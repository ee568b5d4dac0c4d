"""Compare algorithms at equal rollouts: python -m xrpo_fast.study STUDY.toml [--report-only]

Runs what is not finished, seed by seed, then writes tables and figures into the study's
output_dir. The same command goes on with a study that was broken off, and tries again what failed.

Exit codes: 0 all runs are finished; 1 a run failed; 2 the study file, or a folder it names, cannot
be used; 130 stopped by Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from xrpo_fast.config import ConfigError
from xrpo_fast.study.children import locked
from xrpo_fast.study.output import write_results
from xrpo_fast.study.plan import Study
from xrpo_fast.study.prepare import prepare_policies
from xrpo_fast.study.results import collect
from xrpo_fast.study.runner import run_all
from xrpo_fast.study.state import states_of
from xrpo_fast.study.study_file import load_study
from xrpo_fast.study.tables import overview
from xrpo_fast.train import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_UNUSABLE,
    StopOnSignal,
    run_and_exit,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m xrpo_fast.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", type=Path, help="TOML file, e.g. examples/study_quick.toml")
    parser.add_argument(
        "--report-only", action="store_true", help="tables and figures of what is finished"
    )
    options = parser.parse_args(arguments)
    console = Console()
    try:
        study = load_study(options.study)
        code = 0 if options.report_only else _run(study, console)
        _report(study, options.study.stem, console)
        return code
    except ConfigError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        return EXIT_UNUSABLE


def _run(study: Study, console: Console) -> int:
    """Run what is not finished; exit code."""
    with locked(study.file.output_dir) as lock:
        states = states_of(study)
        prepare_policies(study, console)
        with StopOnSignal(console) as stop:
            failed = run_all(study, states, lock, console, stop.is_asked)
            if stop.is_asked():
                return EXIT_INTERRUPTED
    return EXIT_FAILED if failed else 0


def _report(study: Study, title: str, console: Console) -> None:
    results = collect(study, states_of(study))
    command = f"python -m xrpo_fast.study {' '.join(sys.argv[1:])}"
    try:
        paths = write_results(study, results, title, command)
    except OSError as error:
        raise ConfigError(
            f"output_dir: expected to write results into {study.file.output_dir}, got {error}; "
            "free space or permit it, then use --report-only"
        ) from error
    console.print(overview(results))
    for line in results.missing:
        console.print(f"missing: {line}", style="yellow", markup=False, highlight=False)
    for path in paths:
        console.print(f"saved {path}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_and_exit(main)

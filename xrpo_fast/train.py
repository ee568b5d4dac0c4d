"""Train a model: python -m xrpo_fast.train CONFIG [--section.key value ...] [--resume] [--dry-run]

Exit codes: 0 training did what was asked; 1 it failed while running; 2 the config or the data
cannot be used; 130 stopped by Ctrl-C after the step under way, with a checkpoint.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import FrameType

from rich.console import Console

from xrpo_fast.config import Config, ConfigError
from xrpo_fast.config_file import dump_config, load_config
from xrpo_fast.run_dir import (
    check_run_dir,
    end_log,
    hold_run,
    keep_log,
    log_to_console,
    log_to_file,
    make_run_dir,
)

EXIT_FAILED, EXIT_UNUSABLE, EXIT_INTERRUPTED = 1, 2, 130

logger = logging.getLogger("xrpo_fast")


class RunFailed(RuntimeError):
    """The run cannot go on, or trained nothing; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    console = Console()
    log_to_console(console)
    try:
        options, overrides = parse_arguments(arguments)
        config = load_config(options.config, overrides)
        if options.dry_run:
            return dry_run(config, console)
        return _run(config, options, console)
    except Exception as error:
        code, text = explain(error)
        Console(stderr=True).print(f"error: {text}", style="red", markup=False, highlight=False)
        return code


def parse_arguments(
    arguments: Sequence[str] | None,
) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """Known options, and the --section.key value pairs."""
    parser = argparse.ArgumentParser(prog="python -m xrpo_fast.train", allow_abbrev=False)
    parser.add_argument("config", help="TOML file, e.g. examples/quickstart.toml")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="start over in the run folder")
    parser.add_argument("--dry-run", action="store_true", help="check everything, train nothing")
    options, rest = parser.parse_known_args(arguments)
    return options, parse_overrides(rest)


def parse_overrides(rest: Sequence[str]) -> list[tuple[str, str]]:
    """['--optim.learning_rate', '2e-6', ...] -> pairs; --key=value works too."""
    overrides, words = [], list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"command line: expected --section.key value, got {word!r}")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not words:
                raise ConfigError(f"--{key}: expected a value after it, got none")
            value = words.pop(0)
        overrides.append((key, value))
    return overrides


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and message of an error."""
    if isinstance(error, ConfigError):
        return EXIT_UNUSABLE, str(error)
    # Our own errors are ValueErrors and RuntimeErrors whose text says it all.
    is_plain = isinstance(error, ValueError | RuntimeError | OSError) and str(error)
    text = str(error) if is_plain else f"{type(error).__name__}: {error}"
    return EXIT_FAILED, "; ".join([text, *getattr(error, "__notes__", ())])


@contextmanager
def unusable_is_config_error() -> Iterator[None]:
    """While a run is put together, a ValueError of any part is about a key, a file or a model, and
    an ImportError about a package that a key asks for."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error


def dry_run(config: Config, console: Console) -> int:
    """Check model, data, columns, template and memory; print the resolved config."""
    from xrpo_fast.dry_run import check

    with unusable_is_config_error():
        findings = check(config)
    for line in findings:
        console.print(line, markup=False, highlight=False)
    console.print(dump_config(config), markup=False, highlight=False)
    return 0


def _run(config: Config, options: argparse.Namespace, console: Console) -> int:
    from xrpo_fast.assemble import assemble
    from xrpo_fast.checkpoint import latest_checkpoint
    from xrpo_fast.session import Session

    run = check_run_dir(config, resume=options.resume, overwrite=options.overwrite)
    log = keep_log()
    try:
        with ExitStack() as stack:
            # A new folder appears only once everything is ready to start.
            is_new = not run.config.exists()
            if not is_new:
                stack.enter_context(hold_run(run))
            checkpoint = latest_checkpoint(run.path) if options.resume else None
            if options.resume and checkpoint is None:
                raise RunFailed(
                    f"--resume: expected a complete checkpoint in {run.checkpoints}, found none: "
                    f"the run ended before its first, at step {config.checkpoint.every_steps} "
                    "(checkpoint.every_steps); start over with --overwrite"
                )
            with unusable_is_config_error():
                parts = stack.enter_context(closing(assemble(config, checkpoint=checkpoint)))
                if is_new:
                    stack.enter_context(hold_run(run))
                    check_run_dir(config, resume=options.resume, overwrite=options.overwrite)
                make_run_dir(run, config, overwrite=options.overwrite)
                log_to_file(log, run.log)
                session = Session(config, run, parts, console)
            stop = stack.enter_context(StopOnSignal(console))
            finished = session.run(should_stop=stop.is_asked)
        return 0 if finished else EXIT_INTERRUPTED
    except Exception:
        logger.debug("the run ended with an error", exc_info=True)
        raise
    finally:
        end_log(log)


class StopOnSignal:
    """Ctrl-C and SIGTERM: finish the step, save, stop. A second one stops at once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_asked = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopOnSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:
            raise KeyboardInterrupt
        self._is_asked = True
        self._console.print("stopping after this step, with a checkpoint; again to stop now")

    def is_asked(self) -> bool:
        return self._is_asked


def share_cores() -> None:
    """Let the threads of torch's CPU operations sleep soon instead of spinning at every barrier.

    They spin for about a millisecond where nothing is set: with one other busy process on two cores
    a step of the quickstart takes 10 to 20 times as long. With 10,000 rounds it takes 3.5 times as
    long, and 5 % longer than before on a quiet machine. Must come before torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def run_and_exit(main: Callable[[], int]) -> None:
    """Run a command line and end the process with its exit code."""
    share_cores()
    try:
        code = main()
    except KeyboardInterrupt:
        print("stopped at once; what was written so far stands", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    run_and_exit(main)

"""The output folder of a run: made once, never mixed with another run's, resumed exactly."""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from xrpo_fast.config import Config, ConfigError
from xrpo_fast.config_file import dump_config, load_config
from xrpo_fast.files import LOCK, check_can_write, held, replacing

logger = logging.getLogger(__name__)

MAY_CHANGE_ON_RESUME = {
    "run.steps",
    "run.output_dir",
    "run.threads",
    "log",
    "checkpoint",
    "eval",
    "optim.micro_batch_tokens",
    "optim.learning_rate",
    "model.compute_dtype",
    "reward.timeout_s",
    "reward.workers",
    "reward.max_error_frac",
    "rollout.gpu_memory_fraction",
    "rollout.max_concurrent",
}
"""Keys whose value does not change what is trained, or that must change for a longer run or after
one that diverged."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Names of a run's files."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def is_new(self) -> bool:
        """Nothing is there, or only the lock of a run that died before it wrote anything."""
        return not self.path.exists() or all(path.name == LOCK for path in self.path.iterdir())

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step}.parquet"

    def drop_rollouts_after(self, step: int) -> None:
        """Remove those of steps that a resumed run takes again."""
        for path in (self.path / "rollouts").glob("step_*.parquet"):
            number = path.stem.removeprefix("step_")
            if number.isdigit() and int(number) > step:
                path.unlink()


def check_run_dir(config: Config, *, resume: bool, overwrite: bool) -> RunDir:
    """The run's folder, new or to be resumed; nothing is written or removed yet.

    Raises:
        ConfigError: the folder exists and neither resume nor overwrite is asked for; there is
            nothing to resume; a key that decides what is trained has changed; or nothing can be
            written there.
    """
    if resume and overwrite:
        raise ConfigError("--resume, --overwrite: expected one of them, got both")
    run = RunDir(config.run.output_dir / config.run.name)
    check_can_write(run.path, "run.output_dir")
    if resume:
        if not run.config.exists():
            raise ConfigError(f"--resume: expected the run folder {run.path}, found none")
        _check_same_run(config, load_config(run.config), run)
    elif not overwrite and not run.is_new:
        raise ConfigError(
            f"run.name: expected a new run folder, but {run.path} exists; use --resume to go on, "
            "--overwrite to start over, or another run.name"
        )
    elif not run.is_new and not run.config.exists():
        raise ConfigError(
            f"--overwrite: expected a run folder, but {run.path} holds no config.toml; it is "
            "left as it is, choose another run.name"
        )
    return run


def hold_run(run: RunDir) -> AbstractContextManager[IO[str]]:
    """Keep every other process from training in the folder; ConfigError where one already does."""
    return held(
        run.path,
        key="run.output_dir",
        holder="run",
        cure="wait for it, stop it, or choose another run.name",
    )


def make_run_dir(run: RunDir, config: Config, *, overwrite: bool) -> None:
    """Empty the held folder to start over, and write config.toml. Called once everything else is
    ready to start, so that a typo costs neither an old run nor the new one's name."""
    try:
        if overwrite:
            _remove_all_but_lock(run.path)
        with replacing(run.config) as temporary:
            temporary.write_text(dump_config(config))
    except OSError as error:
        raise ConfigError(f"run.output_dir: expected a writable folder, got {error}") from None


def _remove_all_but_lock(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _check_same_run(new: Config, old: Config, run: RunDir) -> None:
    before, after = (dict(flat_keys(config.model_dump(mode="json"))) for config in (old, new))
    for key in sorted(before.keys() | after.keys()):
        free = key in MAY_CHANGE_ON_RESUME or key.split(".")[0] in MAY_CHANGE_ON_RESUME
        if not free and before.get(key) != after.get(key):
            raise ConfigError(
                f"{key}: expected {before.get(key)!r} as in {run.config}, got {after.get(key)!r}; "
                "a resumed run keeps its configuration, start a new run.name to change it"
            )
        if before.get(key) != after.get(key):
            logger.info("%s: %s from here on, was %s", key, after.get(key), before.get(key))


def flat_keys(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(section.key, value) of a config's tables; keys may be written section.key already. A table
    below section.key, such as data.eval, is a value: its own keys may hold dots."""
    for key, value in values.items():
        if isinstance(value, Mapping) and "." not in key:
            for name, item in value.items():
                yield f"{key}.{name}", item
        else:
            yield key, value


def keep_log() -> MemoryHandler:
    """Everything the package logs, tracebacks included, kept until log_to_file gives it a file."""
    handler = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    _add_handler(handler, logging.DEBUG)
    return handler


def log_to_file(kept: MemoryHandler, path: Path) -> None:
    """Write what was kept, and from now on every record, to log.txt."""
    target = _LogFile(path, encoding="utf-8")
    target.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    kept.setTarget(target)
    kept.flush()
    kept.flushLevel = logging.DEBUG


def end_log(kept: MemoryHandler) -> None:
    logging.getLogger("xrpo_fast").removeHandler(kept)
    if kept.target is not None:
        # What a full disk did not take, closing tries again.
        with suppress(OSError):
            kept.target.close()
    kept.close()


def log_to_console(console: Console) -> None:
    """What a person should know while it runs: choices made for them, warnings."""
    _add_handler(_ConsoleHandler(console), logging.INFO)


def _add_handler(handler: logging.Handler, level: int) -> None:
    logger = logging.getLogger("xrpo_fast")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    handler.setLevel(level)
    logger.addHandler(handler)


class _LogFile(logging.FileHandler):
    """Says nothing of its own where the disk is full: the run ends with the error that counts."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        self._console.print(
            f"warning: {record.getMessage()}" if is_warning else record.getMessage(),
            style="yellow" if is_warning else None,
            markup=False,
            highlight=False,
        )

"""Output folders: held by one process at a time, checked before work starts, and errors of a full
disk that name the file.
"""

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from xrpo_fast.config import ConfigError

LOCK = ".lock"

logger = logging.getLogger(__name__)


class OutputError(RuntimeError):
    """A file of the run cannot be written; the message names it and the cure. Exit code 1."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError inside becomes an OutputError about this file."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"run.output_dir: expected to write {path}, got {error}; free space, or move the run's "
            "folder and set run.output_dir to where it lies"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write the file that this yields; it then takes the place of `path` in one move, so that a
    killed process leaves the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def held(folder: Path, *, key: str, holder: str, cure: str) -> Iterator[IO[str]]:
    """Make the folder and hold its lock; the system lets go of it when the process dies.

    Args:
        key, holder, cure: of the error: which key names the folder, who may hold it, what to do.
    Raises:
        ConfigError: another process holds the folder, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise ConfigError(f"{key}: expected a writable folder, got {error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{key}: expected no other {holder} at work in {folder}, but one still is; {cure}"
            ) from None
        except OSError as error:
            # Some network file systems have no locks.
            logger.warning("%s cannot be locked (%s): start no second run there", folder, error)
        yield file


def check_can_write(folder: Path, key: str) -> None:
    """ConfigError where the folder could not be made or written; nothing is left behind."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: expected a writable folder, got {error}") from None

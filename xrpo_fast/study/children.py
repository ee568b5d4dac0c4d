"""Training runs as child processes, and the lock that keeps two studies out of one folder."""

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from xrpo_fast.config_file import dump_config
from xrpo_fast.files import held
from xrpo_fast.study.plan import PlannedRun
from xrpo_fast.study.state import RunState, note_start

LOG_TAIL_LINES = 15


@dataclass(kw_only=True, slots=True)
class Child:
    """A training run in its own process and process group."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    log: Path

    def ask_to_stop(self) -> None:
        """Finish the step, write a checkpoint, end: what Ctrl-C does to a training run."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End the run and its reward workers now."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def log_tail(self) -> str:
        """The last lines of the log, or a word on why there are none."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(the log is empty)"


def start(run: PlannedRun, state: RunState, lock: IO[str]) -> Child:
    """Start, or go on with, a run; its output goes to logs/<run>.txt.

    The child inherits the lock, so that a run which outlives the study still guards the folder.
    """
    folder = run.config.run.output_dir
    config, log = folder / "configs" / f"{run.name}.toml", folder / "logs" / f"{run.name}.txt"
    for path in (config, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(dump_config(run.config), encoding="utf-8")
    flags = {"partial": ["--resume"], "early": ["--overwrite"]}.get(state.kind, [])
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if run.config.run.threads:
        environment["OMP_NUM_THREADS"] = str(run.config.run.threads)
    note_start(run)
    with log.open("ab" if state.kind == "partial" else "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "xrpo_fast.train", str(config), *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[lock.fileno()],
            # Ctrl-C reaches the study alone, which passes it on.
            start_new_session=True,
        )
    return Child(run=run, process=process, log=log)


def locked(folder: Path) -> AbstractContextManager[IO[str]]:
    """Hold the study's folder; ConfigError where another study, or a run it left, holds it."""
    return held(
        folder,
        key="output_dir",
        holder="study",
        cure="a run that it started counts too; wait for it, or choose another output_dir",
    )

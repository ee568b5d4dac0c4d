"""One untrusted program that runs: its limits, its output, its end."""

import contextlib
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Literal

_MIB = 1 << 20

Status = Literal["ok", "failed", "timeout", "output_limit"]


class SandboxError(RuntimeError):
    """The sandbox itself failed; says nothing about the program."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Limits:
    """Bounds of one program run."""

    timeout_s: float
    """Wall clock; where lines are counted, between two lines."""
    memory_mib: int = 1024
    """Address space of the interpreter."""
    output_bytes: int = 16 * _MIB
    """Of standard output; standard error is discarded."""
    file_mib: int = 64
    """Of /tmp as a whole with bubblewrap, of each file without."""


@dataclass(kw_only=True, frozen=True, slots=True)
class RunResult:
    status: Status
    """failed: exited with another code than 0, or was killed by a limit."""
    output: bytes


class Program:
    """A program that runs; a context that kills it and reaps it."""

    def __init__(self, process: subprocess.Popen[bytes], status_fd: int | None) -> None:
        self.process = process
        self._status_fd = status_fd

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        if self._status_fd is not None:
            os.close(self._status_fd)

    def check_started(self) -> None:
        """Once it has ended or shown a sign of life: was it the program, or only bubblewrap?

        Raises:
            SandboxError: bubblewrap could not start the program.
        """
        if self._status_fd is not None and b"child-pid" not in os.read(self._status_fd, 4096):
            raise SandboxError("sandbox: bubblewrap could not start a program")

    def read(
        self, limits: Limits, counts_lines: bool, total_timeout_s: float
    ) -> tuple[Status, bytes]:
        """Output up to its end or a limit."""
        stream = self.process.stdout
        assert stream is not None
        chunks: list[bytes] = []
        num_bytes = 0
        deadline_s = time.monotonic() + limits.timeout_s
        last_s = time.monotonic() + total_timeout_s
        while True:
            remaining_s = min(deadline_s, last_s) - time.monotonic()
            if remaining_s <= 0 or not select.select([stream], [], [], remaining_s)[0]:
                return "timeout", b"".join(chunks)
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                return "ok", b"".join(chunks)
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > limits.output_bytes:
                return "output_limit", b"".join(chunks)[: limits.output_bytes]
            if counts_lines and b"\n" in chunk:
                deadline_s = time.monotonic() + limits.timeout_s

    def wait(self, timeout_s: float) -> Status:
        """How it ended; a program may close its output and go on."""
        try:
            return "ok" if self.process.wait(timeout_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return "timeout"

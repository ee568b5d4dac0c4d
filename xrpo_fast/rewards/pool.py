"""Reward workers in other processes, as the trainer sees them: submit items, poll results.

Each item has a hard wall-clock bound. A worker that passes it, or dies, is killed with all its
descendants, reaped and replaced; its item comes back as an error. See supervisor.py for the
process that does so.
"""

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any

from xrpo_fast.rewards import wire

_START_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 10.0


@dataclass(kw_only=True, slots=True, frozen=True)
class PoolResult:
    """What became of one item: a value from the worker, or the error that took its place."""

    value: dict[str, Any] | None = None
    error: str | None = None


class WorkerPool:
    """Processes that score items with the functions of `functions.ItemScorer`.

    Args:
        functions: names, as in make_verifier.
        options: keyword arguments of the built-in functions, JSON-able.
        num_workers: processes, >= 1.
        timeout_s: wall-clock seconds that one item may take.
        memory_bytes: data segment of a worker; None = unbounded.
    Raises:
        ValueError: a function cannot be loaded; the text is the loader's.
    """

    def __init__(
        self,
        functions: list[str],
        options: dict[str, Any],
        *,
        num_workers: int,
        timeout_s: float,
        memory_bytes: int | None = None,
    ) -> None:
        self._spec = {
            "functions": functions,
            "options": options,
            "num_workers": num_workers,
            "timeout_s": timeout_s,
            "memory_bytes": memory_bytes,
        }
        self._timeout_s = timeout_s
        self._keys: dict[int, int] = {}
        self._next_id = 1
        self._start()

    @property
    def num_pending(self) -> int:
        return len(self._keys)

    def submit(self, key: int, item: dict[str, Any]) -> None:
        """Queue an item; returns at once. `key` comes back with its result."""
        self._keys[self._next_id] = key
        body = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        # The supervisor always reads, so that waiting for room in the socket cannot deadlock.
        self._connection.send(self._next_id, wire.ITEM, body)
        while self._connection.has_outgoing and self._connection.is_open:
            select.select([], [self._connection.sock], [])
            self._connection.flush()
        self._next_id += 1

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, PoolResult]]:
        """Results that are ready; waits up to `timeout_s` for the first."""
        if not self._keys:
            return []
        if timeout_s > 0:
            select.select([self._connection.sock], [], [], timeout_s)
        finished = [
            (self._keys.pop(item_id), self._read(kind, body))
            for item_id, kind, body in self._connection.receive()
        ]
        if not self._connection.is_open:
            finished += self._restart()
        return finished

    def close(self) -> None:
        """Kill the workers and remove their files; harmless when repeated."""
        self._finalizer()

    def _read(self, kind: int, body: bytes) -> PoolResult:
        if kind == wire.RESULT:
            return PoolResult(value=json.loads(body))
        if kind == wire.TIMED_OUT:
            return PoolResult(error=f"passed its time limit of {self._timeout_s:g} s")
        return PoolResult(error=f"worker {body.decode()}")

    def _restart(self) -> list[tuple[int, PoolResult]]:
        self.close()
        error = f"supervisor of the reward workers {_exit_text(self._process)}"
        lost = [(key, PoolResult(error=error)) for key in self._keys.values()]
        self._keys.clear()
        self._start()
        return lost

    def _start(self) -> None:
        temp_root = tempfile.mkdtemp(prefix="xrpo-rewards-")
        # Others may pass through, not look: without bubblewrap, root runs code as nobody.
        os.chmod(temp_root, 0o711)
        ours, theirs = socket.socketpair()
        python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "xrpo_fast.rewards.supervisor", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            # One thread each: a forked worker must not inherit a library's thread pool.
            env={
                **os.environ,
                "PYTHONPATH": python_path,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
        )
        theirs.close()
        self._connection = wire.Connection(ours)
        self._finalizer = weakref.finalize(self, _end, self._process, ours, temp_root)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps({**self._spec, "temp_root": temp_root}).encode())
        self._await_ready()

    def _await_ready(self) -> None:
        ready, _, _ = select.select([self._connection.sock], [], [], _START_TIMEOUT_S)
        frames = list(self._connection.receive()) if ready else []
        if frames and frames[0][1] == wire.READY:
            return
        self.close()
        if frames:
            raise ValueError(frames[0][2].decode())
        if ready:
            text = _exit_text(self._process)
            raise RuntimeError(f"the supervisor of the reward workers {text} while it started")
        raise RuntimeError(f"functions: expected to load within {_START_TIMEOUT_S:g} s, did not")


def _exit_text(process: subprocess.Popen) -> str:
    code = process.returncode
    if code is None:
        return "hung up"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _end(process: subprocess.Popen, sock: socket.socket, temp_root: str) -> None:
    """Hang up, wait for the supervisor to end its workers, insist if it does not."""
    sock.close()
    try:
        process.wait(_CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wire.remove_tree(temp_root)

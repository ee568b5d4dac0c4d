"""Framed messages between the trainer, the supervisor of the reward workers, and the workers.

A frame is an 8-byte item id, a 1-byte kind, a 4-byte body length and the body. Requests are
pickled (they come from us); results are JSON, so that a worker cannot make its parent run code.
"""

import contextlib
import os
import shutil
import signal
import socket
import struct
from collections.abc import Iterator

HEADER = struct.Struct("<QBI")

READY = 0
"""Supervisor to trainer: the reward functions are loaded."""
START_FAILED = 1
"""Supervisor to trainer: the body says why."""
ITEM = 2
"""Trainer to supervisor to worker: score this."""
RESULT = 3
"""Worker to supervisor to trainer: JSON."""
TIMED_OUT = 4
"""Supervisor to trainer: the worker was killed at the time limit."""
DIED = 5
"""Supervisor to trainer: the worker died; the body says how."""

_READ_BYTES = 1 << 18


class Connection:
    """One end of a stream socket: frames in, frames out, never blocking on a write."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_open = True
        self._incoming = bytearray()
        self._outgoing = bytearray()
        sock.setblocking(False)

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def send(self, item_id: int, kind: int, body: bytes) -> None:
        self._outgoing += HEADER.pack(item_id, kind, len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes; the rest waits for the next call."""
        try:
            while self._outgoing:
                with memoryview(self._outgoing) as view:
                    sent = self.sock.send(view[: 1 << 20])
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def receive(self) -> Iterator[tuple[int, int, bytes]]:
        """The complete frames that have arrived; `is_open` turns False at the end of the stream."""
        try:
            while chunk := self.sock.recv(_READ_BYTES):
                self._incoming += chunk
                if len(chunk) < _READ_BYTES:
                    break
            else:
                self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        start = 0
        while len(self._incoming) - start >= HEADER.size:
            item_id, kind, length = HEADER.unpack_from(self._incoming, start)
            end = start + HEADER.size + length
            if len(self._incoming) < end:
                break
            yield item_id, kind, bytes(self._incoming[start + HEADER.size : end])
            start = end
        del self._incoming[:start]

    def close(self) -> None:
        self.is_open = False
        self.sock.close()


def child_pids(parent_pid: int) -> list[int]:
    """Direct children of a process, from /proc; empty where there is no /proc."""
    children = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                    # The command name may hold spaces and brackets: fields start after the last.
                    fields = stat.read().rpartition(b")")[2].split()
                    if int(fields[1]) == parent_pid:
                        children.append(int(name))
    return children


def kill_children(keep: frozenset[int] = frozenset()) -> int:
    """Kill and reap every child of this process but `keep`, and what they leave behind.

    A subreaper inherits the orphans of its descendants, so that repeating this until nothing is
    left also ends processes that moved to another session.
    """
    num_killed = 0
    while strangers := [pid for pid in child_pids(os.getpid()) if pid not in keep]:
        for pid in strangers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            num_killed += 1
    return num_killed


def remove_tree(path: str) -> None:
    """Delete a folder of untrusted content, read-only parts included."""

    def make_writable(function, failed_path, _error) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(failed_path), 0o700)
            if not os.path.islink(failed_path):
                os.chmod(failed_path, 0o700)
            function(failed_path)

    if os.path.isdir(path):
        shutil.rmtree(path, onerror=make_writable)
        shutil.rmtree(path, ignore_errors=True)

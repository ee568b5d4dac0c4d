"""The process that owns the reward workers: python -m xrpo_fast.rewards.supervisor FD.

It is started with a fresh interpreter, so it has no threads and no accelerator state of the
trainer; it imports the reward functions once and forks workers from there, so that replacing one
costs milliseconds. It hands out items, one at a time to each worker, kills a worker at the time
limit with all its descendants, replaces it, and never waits for the trainer to look.
"""

import contextlib
import gc
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import deque
from dataclasses import dataclass, field

from xrpo_fast.rewards import wire
from xrpo_fast.rewards.process import adopt_orphans, describe_exit, die_with_parent, lower_limit

ITEMS_PER_WORKER = 5000
"""A worker is replaced after so many items: caches of symbolic algebra grow without bound."""
MAX_IDLE_DEATHS = 20
"""More workers dying in a row without an item: something kills them from outside."""


@dataclass(slots=True)
class Worker:
    pid: int
    connection: wire.Connection
    temp_dir: str
    item_id: int | None = None
    deadline_s: float = field(default=float("inf"))
    num_done: int = 0


class Supervisor:
    def __init__(self, trainer: wire.Connection, spec: dict, scorer) -> None:
        self.trainer = trainer
        self.scorer = scorer
        self.timeout_s: float = spec["timeout_s"]
        self.memory_bytes: int | None = spec["memory_bytes"]
        self.temp_root: str = spec["temp_root"]
        self.queue: deque[tuple[int, bytes]] = deque()
        self.workers: dict[int, Worker] = {}
        self.num_idle_deaths = 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(trainer.sock, selectors.EVENT_READ, None)
        for _ in range(spec["num_workers"]):
            self.start_worker()

    def run(self) -> None:
        """Serve until the trainer hangs up."""
        while self.trainer.is_open:
            events = selectors.EVENT_READ
            if self.trainer.has_outgoing:
                events |= selectors.EVENT_WRITE
            self.selector.modify(self.trainer.sock, events, None)
            for key, mask in self.selector.select(self.seconds_to_deadline()):
                if key.data is None:
                    self.serve_trainer(mask)
                elif key.data.pid in self.workers:
                    self.serve_worker(key.data)
            self.kill_late_workers()
            self.hand_out()

    def seconds_to_deadline(self) -> float | None:
        deadline_s = min(worker.deadline_s for worker in self.workers.values())
        return None if deadline_s == float("inf") else max(0.0, deadline_s - time.monotonic())

    def serve_trainer(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self.trainer.flush()
        if mask & selectors.EVENT_READ:
            self.queue.extend((item_id, body) for item_id, _, body in self.trainer.receive())

    def serve_worker(self, worker: Worker) -> None:
        if worker.connection.has_outgoing:
            worker.connection.flush()
        for item_id, kind, body in worker.connection.receive():
            if item_id == worker.item_id:
                self.trainer.send(item_id, kind, body)
                worker.item_id, worker.deadline_s = None, float("inf")
                worker.num_done += 1
                self.num_idle_deaths = 0
                self.watch(worker)
        if not worker.connection.is_open:
            self.replace(worker, wire.DIED)
        elif worker.num_done >= ITEMS_PER_WORKER:
            self.replace(worker, None)

    def kill_late_workers(self) -> None:
        now_s = time.monotonic()
        for worker in [w for w in self.workers.values() if w.deadline_s <= now_s]:
            self.replace(worker, wire.TIMED_OUT)

    def hand_out(self) -> None:
        for worker in self.workers.values():
            if not self.queue:
                return
            if worker.item_id is None:
                item_id, body = self.queue.popleft()
                worker.item_id = item_id
                worker.deadline_s = time.monotonic() + self.timeout_s
                worker.connection.send(item_id, wire.ITEM, body)
                self.watch(worker)

    def watch(self, worker: Worker) -> None:
        events = selectors.EVENT_READ
        if worker.connection.has_outgoing:
            events |= selectors.EVENT_WRITE
        self.selector.modify(worker.connection.sock, events, worker)

    def start_worker(self) -> None:
        ours, theirs = socket.socketpair()
        temp_dir = tempfile.mkdtemp(prefix="worker-", dir=self.temp_root)
        os.chmod(temp_dir, 0o711)
        pid = os.fork()
        if pid == 0:
            ours.close()
            self.trainer.sock.close()
            for other in self.workers.values():
                other.connection.sock.close()
            self.selector.close()
            run_worker(theirs, self.scorer, temp_dir, self.memory_bytes)
        theirs.close()
        worker = Worker(pid, wire.Connection(ours), temp_dir)
        self.workers[pid] = worker
        self.selector.register(ours, selectors.EVENT_READ, worker)

    def replace(self, worker: Worker, kind: int | None) -> None:
        """End a worker and everything it started, report its item as `kind`, start another."""
        exit_text = self.end_worker(worker)
        if worker.item_id is not None and kind is not None:
            self.trainer.send(worker.item_id, kind, exit_text.encode())
        elif kind == wire.DIED:
            self.num_idle_deaths += 1
            if self.num_idle_deaths > MAX_IDLE_DEATHS:
                text = f"reward workers die before they get an item (last: {exit_text})"
                raise RuntimeError(text)
        self.start_worker()

    def end_worker(self, worker: Worker) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        self.selector.unregister(worker.connection.sock)
        worker.connection.close()
        del self.workers[worker.pid]
        wire.kill_children(keep=frozenset(self.workers))
        wire.remove_tree(worker.temp_dir)
        return describe_exit(status)

    def close(self) -> None:
        for worker in list(self.workers.values()):
            self.end_worker(worker)


def run_worker(sock: socket.socket, scorer, temp_dir: str, memory_bytes: int | None) -> None:
    """Score items until the supervisor hangs up. Never returns."""
    os.setsid()
    die_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    lower_limit(resource.RLIMIT_CORE, 0)
    if memory_bytes is not None:
        lower_limit(resource.RLIMIT_DATA, memory_bytes)
    os.environ["TMPDIR"] = tempfile.tempdir = temp_dir
    sock.setblocking(True)
    stream = sock.makefile("rwb")
    try:
        while header := stream.read(wire.HEADER.size):
            item_id, _, length = wire.HEADER.unpack(header)
            item = pickle.loads(stream.read(length))
            body = json.dumps(scorer(item)).encode()
            stream.write(wire.HEADER.pack(item_id, wire.RESULT, len(body)) + body)
            stream.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    trainer = wire.Connection(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    spec = json.loads(sys.stdin.read())
    from xrpo_fast.rewards.functions import ItemScorer

    try:
        scorer = ItemScorer(spec["functions"], spec["options"])
    except Exception as error:
        trainer.sock.setblocking(True)
        trainer.send(0, wire.START_FAILED, str(error).encode())
        return
    # The trainer goes on while this process warms up; its items wait in the socket.
    trainer.send(0, wire.READY, b"")
    scorer.warm_up()
    gc.collect()
    gc.freeze()
    supervisor = Supervisor(trainer, spec, scorer)
    try:
        supervisor.run()
    finally:
        supervisor.close()


if __name__ == "__main__":
    main()

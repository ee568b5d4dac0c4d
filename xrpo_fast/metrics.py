"""Names, units and sinks of what is measured; one read from the device per step.

metrics.jsonl holds one JSON object per step and is always written; trackers are optional.
"""

import importlib.util
import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from xrpo_fast.files import replacing, writing

PHASES = (
    "plan",
    "retrieve",
    "generate",
    "barrier_idle",
    "verify",
    "logprob",
    "advantage",
    "update",
    "sync",
    "save",
)
"""Phases of a step, in timing_s/<phase>; disjoint, so that with `other` they add up to `step`."""

TAIL_BYTES = 64 * 1024
"""Read at a time from the end of metrics.jsonl; most lines are a few thousand bytes."""


class Clock:
    """Seconds per phase of the step under way."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] += seconds

    def lap(self) -> dict[str, float]:
        """timing_s/* since the last lap; starts the next one."""
        now = time.perf_counter()
        step_s = now - self._start
        timings = {f"timing_s/{phase}": seconds for phase, seconds in self._seconds.items()}
        timings["timing_s/other"] = step_s - sum(self._seconds.values())
        timings["timing_s/step"] = step_s
        self._start = now
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return timings


class DeviceSums:
    """Sums and maxima that stay on the device until the step's single read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def maximum(self, **values: Tensor) -> None:
        for name, value in values.items():
            value = value.detach().float()
            old = self._maxima.get(name)
            self._maxima[name] = value if old is None else torch.maximum(old, value)

    def read(self) -> dict[str, float]:
        """All values in one transfer; empties the sums."""
        named = {**self._sums, **self._maxima}
        self._sums, self._maxima = {}, {}
        if not named:
            return {}
        return dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True))


class Tracker(Protocol):
    """A sink besides metrics.jsonl."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class MetricsWriter:
    """Appends one line per step to metrics.jsonl and mirrors it to the trackers."""

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()) -> None:
        self.path = path
        self._trackers = trackers
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One whole line per call, flushed: a killed run leaves at most one broken last line."""
        finite = {key: to_json_number(value) for key, value in values.items()}
        with writing(self.path):
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
        numbers = {key: value for key, value in finite.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def close(self) -> None:
        # A full disk was said by write(), whose line closing tries to write again.
        with suppress(OSError):
            self._file.flush()
            os.fsync(self._file.fileno())
        with suppress(OSError):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def to_json_number(value: Any) -> Any:
    """Plain JSON values; what is not finite becomes null, since JSON has no NaN."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl, in order; a broken last line (killed run) is left out."""
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}:{number}: expected a JSON object, got {line[:80]!r}"
            ) from None
    return rows


def read_last_metrics(path: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics.jsonl, None where there is none; reads the file's end only,
    so that a run of thousands of steps can be asked for its step twice a second."""
    tail = b""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        # The last line lies between the last two line ends.
        while start and tail.count(b"\n") < 2:
            end, start = start, max(start - TAIL_BYTES, 0)
            file.seek(start)
            tail = file.read(end - start) + tail
    line = tail.rpartition(b"\n")[0].rpartition(b"\n")[2]
    return json.loads(line) if line else None


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drop the lines after last_step, for a resumed run; the file is replaced in one move."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= last_step]
    with writing(path), replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def check_trackers(names: Sequence[str]) -> None:
    """ImportError where a tracker's package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ImportError(
                f"log.trackers: expected the package {name}, which is not installed; "
                f"pip install {name}"
            )


def make_trackers(names: Sequence[str], run_dir: Path, run_name: str) -> list[Tracker]:
    """Trackers by name; a missing package is an error that names it."""
    check_trackers(names)
    makers = {"tensorboard": _TensorBoard, "wandb": _WandB}
    return [makers[name](run_dir, run_name) for name in names]


class _TensorBoard:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        del run_name
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project="xrpo_fast",
            name=run_name,
            id=_wandb_id(run_dir),
            resume="allow",
            dir=str(run_dir),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    """The run's own id, kept in its folder for --resume: names repeat from study to study."""
    path = run_dir / "wandb_id.txt"
    if not path.exists():
        with writing(path), replacing(path) as temporary:
            temporary.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def memory_metrics() -> dict[str, float]:
    """memory/rss_gib and, on a GPU, memory/gpu_peak_gib since the last call."""
    values = {}
    status = Path("/proc/self/statm")
    if status.exists():
        pages = int(status.read_text().split()[1])
        values["memory/rss_gib"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    if torch.cuda.is_available():
        values["memory/gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return values

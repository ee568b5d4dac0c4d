"""Sinks and clocks: what is written is read back, also after a kill."""

import json
import math
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from xrpo_fast.metrics import (
    PHASES,
    TAIL_BYTES,
    Clock,
    DeviceSums,
    MetricsWriter,
    make_trackers,
    memory_metrics,
    read_last_metrics,
    read_metrics,
    to_json_number,
    truncate_metrics,
)


class ListTracker:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict]] = []
        self.is_closed = False

    def log(self, values, step):
        self.logged.append((step, dict(values)))

    def close(self):
        self.is_closed = True


def test_lines_are_whole_and_on_disk_after_each_write(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, {"loss": 0.5, "planner/rollouts": np.int64(8)})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5, "planner/rollouts": 8}
    writer.write(2, {"loss": float("nan")})
    assert len(path.read_text().splitlines()) == 2
    writer.close()
    assert read_metrics(path)[1] == {"step": 2, "loss": None}


def test_trackers_get_the_finite_numbers_only(tmp_path):
    tracker = ListTracker()
    writer = MetricsWriter(tmp_path / "metrics.jsonl", [tracker])
    writer.write(3, {"loss": np.float32(0.25), "kl": math.inf, "note": "text"})
    writer.close()
    assert tracker.logged == [(3, {"loss": 0.25})]
    assert tracker.is_closed


def test_writing_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        writer = MetricsWriter(path)
        writer.write(step, {})
        writer.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (torch.tensor(2.0), 2.0),
        (float("inf"), None),
        (float("nan"), None),
        (None, None),
        (True, True),
        ("text", "text"),
    ],
    ids=["int64", "float32", "tensor", "inf", "nan", "none", "bool", "text"],
)
def test_json_numbers(value, expected):
    result = to_json_number(value)
    assert result == expected
    assert type(result) is type(expected)


def test_a_broken_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_amid_others_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    message = re.escape("""metrics.jsonl:2: expected a JSON object, got '{"st'""")
    with pytest.raises(ValueError, match=message):
        read_metrics(path)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", None),
        ('{"st', None),
        ('{"step": 0}\n', {"step": 0}),
        ('{"step": 0}\n{"step": 1}\n{"step": 2, "lo', {"step": 1}),
        (
            f'{{"step": 0}}\n{{"step": 1, "note": "{"x" * 2 * TAIL_BYTES}"}}\n',
            {"step": 1, "note": "x" * 2 * TAIL_BYTES},
        ),
    ],
    ids=["empty", "no-whole-line", "one", "broken-last", "longer-than-one-read"],
)
def test_the_last_line_is_read_from_the_end(tmp_path, text, last):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    assert read_last_metrics(path) == last


def test_truncation_keeps_the_steps_up_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(6)) + '{"step": 6, "x')
    truncate_metrics(path, 3)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    writer = MetricsWriter(path)
    writer.write(4, {"loss": 1.0})
    writer.close()
    assert read_metrics(path)[-1] == {"step": 4, "loss": 1.0}
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncating_nothing(tmp_path):
    truncate_metrics(tmp_path / "metrics.jsonl", 3)
    assert not any(tmp_path.iterdir())


def test_device_sums_add_and_take_maxima_and_start_over():
    sums = DeviceSums()
    for value in (1.0, 2.5):
        sums.add(loss=torch.tensor(value), tokens=torch.tensor(3))
        sums.maximum(gap=torch.tensor(-value))
    assert sums.read() == {"loss": 3.5, "tokens": 6.0, "gap": -1.0}
    assert sums.read() == {}
    sums.add(loss=torch.tensor(7.0))
    assert sums.read() == {"loss": 7.0}


def test_device_sums_cut_the_graph():
    sums = DeviceSums()
    parameter = torch.tensor(2.0, requires_grad=True)
    sums.add(loss=parameter * 3)
    assert not any(value.requires_grad for value in sums._sums.values())


def test_clock_names_every_phase_and_adds_up(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock()
    with clock("plan"):
        now[0] += 2.0
    with clock("plan"):
        now[0] += 0.5
    now[0] += 1.0
    clock.add("generate", 0.25)
    timings = clock.lap()
    assert set(timings) == {f"timing_s/{phase}" for phase in (*PHASES, "other", "step")}
    assert timings["timing_s/plan"] == 2.5
    assert timings["timing_s/generate"] == 0.25
    assert timings["timing_s/other"] == 0.75
    assert timings["timing_s/step"] == 3.5
    now[0] += 4.0
    second = clock.lap()
    assert (second["timing_s/plan"], second["timing_s/step"]) == (0.0, 4.0)


def test_clock_counts_a_phase_that_raises():
    clock = Clock()
    with pytest.raises(RuntimeError), clock("save"):
        raise RuntimeError("disk")
    assert clock.lap()["timing_s/save"] > 0


def test_memory_is_that_of_this_process():
    rss_gib = memory_metrics()["memory/rss_gib"]
    with open("/proc/self/status") as status:
        kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert rss_gib == pytest.approx(kib / 2**20, rel=0.1)


def test_tensorboard_holds_what_was_logged(tmp_path, require):
    require("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = make_trackers(["tensorboard"], tmp_path, "run")
    for step, loss in enumerate([0.5, 0.25], start=1):
        tracker.log({"loss": loss}, step)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_missing_tracker_packages_are_named(tmp_path, monkeypatch, name):
    for module in ("torch.utils.tensorboard", "tensorboard", "wandb"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    message = f"log.trackers: expected the package {name}, which is not installed"
    with pytest.raises(ImportError, match=message):
        make_trackers([name], tmp_path, "run")


def test_wandb_runs_have_ids_of_their_own_and_go_on_with_them(tmp_path, monkeypatch):
    started = []
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.init = lambda **given: started.append(given) or SimpleNamespace(finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    # Two studies have an arm of the same name; the first one's run is then resumed.
    for study in ("one", "two", "one"):
        folder = tmp_path / study / "xrpo-seed0"
        folder.mkdir(parents=True, exist_ok=True)
        make_trackers(["wandb"], folder, "xrpo-seed0")[0].close()
    first, second, resumed = (given["id"] for given in started)
    assert first != second
    assert resumed == first
    assert {(given["name"], given["resume"]) for given in started} == {("xrpo-seed0", "allow")}

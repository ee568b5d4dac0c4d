"""Checkpoints: whole or absent after a crash at any write, exact after a round trip."""

import json
import os
import pathlib
import resource
import shutil

import pytest
import safetensors.torch
import torch

from xrpo_fast.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_state,
    save_checkpoint,
    valid_checkpoints,
)

MODEL_FILE = "model.bin"


class Crash(BaseException):
    """Stands for kill -9: no handler of the code under test may catch it."""


class TinyPolicy:
    """Writes its number where a policy writes its model."""

    def __init__(self, number: int) -> None:
        self.number = number

    def save(self, folder: pathlib.Path) -> None:
        (folder / MODEL_FILE).write_text(str(self.number))


def save(folder: pathlib.Path, step: int, keep: int = 2) -> pathlib.Path:
    return save_checkpoint(
        folder,
        step,
        policy=TinyPolicy(step),
        optimizer_state={"moment": torch.full((3,), float(step))},
        state={"steps_done": step},
        keep=keep,
    )


def assert_whole(checkpoint: pathlib.Path, step: int) -> None:
    """Model, optimizer and state of the checkpoint are all those of the step."""
    state, optimizer = load_state(checkpoint)
    assert state == {"steps_done": step}
    assert optimizer["moment"].tolist() == [step] * 3
    assert (checkpoint / MODEL_FILE).read_text() == str(step)


def test_round_trip_restores_state_optimizer_and_random_numbers(tmp_path):
    torch.manual_seed(3)
    checkpoint = save(tmp_path / "checkpoints", 7)
    expected = torch.rand(4)
    torch.manual_seed(99)
    assert_whole(checkpoint, 7)
    assert torch.equal(torch.rand(4), expected), "load_state sets the generators back"
    assert latest_checkpoint(tmp_path) == checkpoint


def test_only_the_newest_are_kept_by_number_not_by_name(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=2)
    assert [path.name for path in valid_checkpoints(tmp_path)] == ["step_10", "step_11"]
    assert sorted(os.listdir(tmp_path)) == ["step_10", "step_11"]


def test_a_copy_under_another_name_is_left_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(save(folder, 2), folder / "step_2_best")
    for step in (3, 4):
        save(folder, step, keep=1)
    assert [path.name for path in valid_checkpoints(folder)] == ["step_4"]
    assert latest_checkpoint(tmp_path) == folder / "step_4"
    assert_whole(folder / "step_2_best", 2)


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "step_4" / "left_over").write_text("x")
    assert_whole(save(tmp_path, 4), 4)
    assert not (tmp_path / "step_4" / "left_over").exists()


def test_no_checkpoint_no_run(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert valid_checkpoints(tmp_path / "nowhere") == []


def test_a_folder_without_its_marker_is_no_checkpoint(tmp_path):
    save(tmp_path / "checkpoints", 1)
    unfinished = tmp_path / "checkpoints" / "step_2"
    shutil.copytree(tmp_path / "checkpoints" / "step_1", unfinished)
    (unfinished / "COMPLETE").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_1"


class Tripwire:
    """Counts the operations that change the disk and crashes before the n-th, or amid it."""

    def __init__(self, monkeypatch, crash_at: int | None, *, amid: bool) -> None:
        self.count = 0
        self.crash_at = crash_at
        self.amid = amid
        for owner, name in [
            (pathlib.Path, "mkdir"),
            (pathlib.Path, "write_text"),
            (pathlib.Path, "replace"),
            (shutil, "rmtree"),
            (torch, "save"),
            (os, "fsync"),
        ]:
            monkeypatch.setattr(owner, name, self._wrapped(name, getattr(owner, name)))

    def _wrapped(self, name, original):
        def wrapper(*arguments, **options):
            self.count += 1
            if self.count != self.crash_at:
                return original(*arguments, **options)
            if self.amid and name == "rmtree":
                _remove_one_file(pathlib.Path(arguments[0]))
            elif self.amid and name == "write_text":
                original(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif self.amid and name == "save":
                pathlib.Path(arguments[1]).write_bytes(b"half")
            raise Crash(name)

        return wrapper


def _remove_one_file(folder: pathlib.Path) -> None:
    """What an interrupted removal leaves: any file but the marker may be gone."""
    for path in folder.glob(MODEL_FILE):
        os.unlink(path)


def count_writes(folder, monkeypatch) -> int:
    with monkeypatch.context() as patch:
        wire = Tripwire(patch, None, amid=False)
        save(folder, 3, keep=1)
    return wire.count


@pytest.mark.parametrize("amid", [False, True], ids=["before", "amid"])
def test_crash_at_any_write_leaves_a_whole_checkpoint(tmp_path, monkeypatch, amid):
    reference = tmp_path / "reference"
    for step in (1, 2):
        save(reference, step)
    num_writes = count_writes(reference, monkeypatch)
    assert num_writes > 10
    for crash_at in range(1, num_writes + 1):
        run = tmp_path / f"run_{crash_at}"
        for step in (1, 2):
            save(run / "checkpoints", step)
        with monkeypatch.context() as patch:
            Tripwire(patch, crash_at, amid=amid)
            with pytest.raises(Crash):
                save(run / "checkpoints", 3, keep=1)
        found = valid_checkpoints(run / "checkpoints")
        for checkpoint in found:
            assert_whole(checkpoint, int(checkpoint.name.removeprefix("step_")))
        assert found[-1].name in ("step_2", "step_3"), f"crash at write {crash_at}"
        assert latest_checkpoint(run) == found[-1]
        assert_whole(save(run / "checkpoints", 3, keep=1), 3)
        assert os.listdir(run / "checkpoints") == ["step_3"], "nothing is left of the crash"


@pytest.mark.parametrize("amid", [False, True], ids=["before", "amid"])
def test_crash_while_a_step_is_saved_again_leaves_the_one_before(tmp_path, monkeypatch, amid):
    reference = tmp_path / "reference"
    save(reference, 2)
    save(reference, 3)
    num_writes = count_writes(reference, monkeypatch)
    for crash_at in range(1, num_writes + 1):
        run = tmp_path / f"run_{crash_at}"
        for step in (2, 3):
            save(run, step)
        with monkeypatch.context() as patch:
            Tripwire(patch, crash_at, amid=amid)
            with pytest.raises(Crash):
                save(run, 3, keep=1)
        for checkpoint in valid_checkpoints(run):
            assert_whole(checkpoint, int(checkpoint.name.removeprefix("step_")))
        assert valid_checkpoints(run)


@pytest.fixture
def small_disk():
    """No file can grow beyond 100 kB, as if the disk were full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class SafetensorsPolicy:
    """Writes its model the way that transformers does."""

    def __init__(self, num_bytes: int) -> None:
        self.weights = {"weight": torch.zeros(num_bytes, dtype=torch.uint8)}

    def save(self, folder: pathlib.Path) -> None:
        safetensors.torch.save_file(self.weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("model_bytes", "optimizer_bytes", "state_bytes"),
    [(500_000, 10, 10), (10, 500_000, 10), (10, 10, 500_000)],
    ids=["model", "optimizer", "state"],
)
def test_full_disk_is_a_plain_message_and_earlier_checkpoints_stand(
    tmp_path, small_disk, model_bytes, optimizer_bytes, state_bytes
):
    """Each of the three writers has its own way to say that a write failed."""
    save(tmp_path, 1)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint: expected to write .*step_2, got .*; free space, or move",
    ):
        save_checkpoint(
            tmp_path,
            2,
            policy=SafetensorsPolicy(model_bytes),
            optimizer_state={"moment": torch.zeros(optimizer_bytes, dtype=torch.uint8)},
            state={"text": "x" * state_bytes},
            keep=2,
        )
    assert os.listdir(tmp_path) == ["step_1"], "the half-written one is gone"
    assert_whole(tmp_path / "step_1", 1)


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint: expected to write .*step_1, got"):
        save(tmp_path / "file" / "checkpoints", 1)


@pytest.mark.parametrize("name", ["state.json", "trainer.pt"])
@pytest.mark.parametrize(
    "content", [None, b"", b"\x00 not this"], ids=["missing", "empty", "other"]
)
def test_unreadable_checkpoints_are_named(tmp_path, name, content):
    checkpoint = save(tmp_path, 5)
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoint: expected a readable .*step_5, got"):
        load_state(checkpoint)


def test_state_is_plain_json(tmp_path):
    checkpoint = save(tmp_path, 5)
    assert json.loads((checkpoint / "state.json").read_text()) == {"steps_done": 5}

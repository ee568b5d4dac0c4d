"""Save and exact resume. A checkpoint is written beside its final name and moved there whole; its
marker, written last, makes it valid. Kill -9 between any two writes leaves the one before.
"""

import json
import os
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

MARKER = "COMPLETE"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which and what to do. Exit 1."""


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    policy: Any,
    optimizer_state: dict[str, Any],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write checkpoints/step_N and remove all but the newest `keep`.

    Args:
        policy: has save(folder), writing model and tokenizer in Hugging Face format.
        state: JSON values: step, data position, planner, corpus, prompt states.
    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints stand.
    """
    final = folder / f"step_{step}"
    temporary = folder / f".step_{step}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(".step_*.tmp"):
            shutil.rmtree(left_over)
        temporary.mkdir()
        policy.save(temporary)
        torch.save({"optimizer": optimizer_state, "rng": rng_state()}, temporary / "trainer.pt")
        (temporary / "state.json").write_text(json.dumps(state))
        _sync(temporary)
        (temporary / MARKER).write_text(f"{step}\n")
        _sync(temporary)
        remove_checkpoint(final)
        temporary.replace(final)
    except (OSError, RuntimeError, SafetensorError) as error:
        # A full disk is a RuntimeError to torch.save and an error of its own kind to safetensors.
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint: expected to write {final}, got {error}; free space, or move the "
            "run's folder and set run.output_dir to where it lies"
        ) from error
    for old in valid_checkpoints(folder)[:-keep]:
        remove_checkpoint(old)
    return final


def remove_checkpoint(checkpoint: Path) -> None:
    """Moved away first: a checkpoint half removed must not look complete."""
    if checkpoint.exists():
        condemned = checkpoint.replace(checkpoint.with_name(f".{checkpoint.name}.old.tmp"))
        shutil.rmtree(condemned)


def load_state(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, optimizer state) of a checkpoint; restores the random number generators.

    Raises:
        CheckpointError: a file is missing or does not parse.
    """
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        saved = torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        raise CheckpointError(
            f"checkpoint: expected a readable {checkpoint}, got {error!r:.200}; remove it to "
            "resume from the one before"
        ) from error
    set_rng_state(saved["rng"])
    return state, saved["optimizer"]


def valid_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; a user's copies under other names are none of ours."""
    found = [path.parent for path in folder.glob(f"step_*/{MARKER}")]
    found = [path for path in found if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    found = valid_checkpoints(run_dir / "checkpoints")
    return found[-1] if found else None


def rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sync(folder: Path) -> None:
    """Data on disk before the name that promises it."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

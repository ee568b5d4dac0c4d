"""Gradient checkpointing and bfloat16: what a large model needs trains a small one alike."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small_run import small_arguments
from xrpo_fast.metrics import read_metrics
from xrpo_fast.train import main


def rows_of(folder: Path, **changes: str) -> list[dict[str, Any]]:
    """Metrics of the steps of a small run."""
    assert main(small_arguments(folder, **changes)) == 0
    rows = read_metrics(folder / "quickstart" / "metrics.jsonl")
    return [row for row in rows if row["step"] > 0]


def test_gradient_checkpointing_recomputes_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.utils.checkpoint

    num_recomputed = 0
    checkpoint = torch.utils.checkpoint.checkpoint

    def counted(function: Any, *args: Any, **options: Any) -> Any:
        nonlocal num_recomputed
        num_recomputed += torch.is_grad_enabled()
        return checkpoint(function, *args, **options)

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", counted)
    (plain,) = rows_of(tmp_path / "plain", run__steps="1")
    assert num_recomputed == 0
    (saving,) = rows_of(tmp_path / "saving", run__steps="1", model__gradient_checkpointing="true")
    assert num_recomputed > 0
    for key in ("reward/mean", "tokens/generated", "updates"):
        assert saving[key] == plain[key]
    for key in ("loss", "grad_norm", "entropy"):
        assert saving[key] == pytest.approx(plain[key], rel=1e-5, abs=1e-7)


def test_bfloat16_trains_on_float32_master_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = rows_of(tmp_path, run__steps="2", model__compute_dtype="bfloat16")
    assert [row["step"] for row in rows] == [1, 2]
    # Sampler and trainer round alike or not; either way they are of one policy.
    assert 1e-4 < rows[0]["mismatch/logprob_abs_max"] < 1.0
    assert all(row["updates"] > 0 and 0 < row["grad_norm"] < 100 for row in rows)
    checkpoints = tmp_path / "quickstart" / "checkpoints"
    trained = AutoModelForCausalLM.from_pretrained(checkpoints / "step_2", dtype="auto")
    weight = trained.get_input_embeddings().weight
    assert weight.dtype == torch.float32
    assert (weight != weight.to(torch.bfloat16)).any()

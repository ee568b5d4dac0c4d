"""algorithm = "treepo" end to end: real engines, fewer tokens, exact resume."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests import test_local_model
from tests.small_run import small_arguments
from xrpo_fast.metrics import read_metrics
from xrpo_fast.train import main

CONFIG = Path(__file__).parent.parent / "examples" / "quickstart_treepo.toml"


def arguments(output_dir: Path, *flags: str, **changes: str) -> list[str]:
    """Of a small run of the example; the planner has no base."""
    changes = {"planner__base_rollouts": "0"} | changes
    return [str(CONFIG), *small_arguments(output_dir, *flags, **changes)[1:]]


def comparable(rows: Sequence[dict]) -> list[dict]:
    """Rows without seconds and memory."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "memory/"))} for row in rows
    ]


def test_trees_train_and_resume_exactly(tmp_path: Path) -> None:
    assert main(arguments(tmp_path / "whole")) == 0
    whole = comparable(read_metrics(tmp_path / "whole" / "quickstart_treepo" / "metrics.jsonl"))
    assert sum(row["updates"] for row in whole[1:]) > 0
    for row in whole[1:]:
        assert row["planner/rollouts"] == 12 * 6
        assert row["planner/rollouts_min"] == row["planner/rollouts_max"] == 6
        leaf_tokens = 72 * row["completions/mean_length"]
        assert row["tokens/generated"] < leaf_tokens
        assert row["tokens/shared_frac"] == pytest.approx(1 - row["tokens/generated"] / leaf_tokens)
        assert row.get("mismatch/logprob_abs_max", 0.0) < 1e-4
        assert row["icl/seeded_rollouts"] == 0
    assert main(arguments(tmp_path / "parts", run__steps="2")) == 0
    assert main(arguments(tmp_path / "parts", "--resume")) == 0
    parts = comparable(read_metrics(tmp_path / "parts" / "quickstart_treepo" / "metrics.jsonl"))
    assert [row for row in parts if row["step"] > 2] == whole[3:]


def test_vllm_generates_fewer_tokens_for_as_many_rollouts(
    require: Callable[[str], None], tmp_path: Path
) -> None:
    require("vllm")
    runs = {}
    for algorithm in ("dapo", "treepo"):
        folder = tmp_path / algorithm
        folder.mkdir()
        words = test_local_model.arguments(
            folder,
            "llama",
            algorithm=algorithm,
            planner__allocation="uniform",
            rollout__rollouts_per_prompt="8",
            rollout__max_response_tokens="24",
            tree__segment_tokens="4",
            run__steps="2",
        )
        assert main(words) == 0
        runs[algorithm] = read_metrics(folder / "runs" / "local_model" / "metrics.jsonl")
    for alone, trees in zip(runs["dapo"][1:], runs["treepo"][1:], strict=True):
        assert alone["planner/rollouts"] == trees["planner/rollouts"] == 56
        assert alone["tokens/shared_frac"] == 0
        assert trees["tokens/shared_frac"] > 0.05
        assert trees["mismatch/logprob_abs_max"] < 1e-4
        assert trees["updates"] > 0
    generated = {
        name: sum(row["tokens/generated"] for row in rows[1:]) for name, rows in runs.items()
    }
    assert generated["treepo"] < generated["dapo"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__rollouts_per_prompt": "6.5"}, "expected a whole number of leaves"),
        ({"rollout__rollouts_per_prompt": "1"}, "at least tree.min_fanout = 2"),
        ({"planner__allocation": "greedy"}, "planner.allocation: expected 'uniform' with tree."),
        ({"planner__allocation": "greedy", "icl__enabled": "true"}, "planner.allocation: expected"),
        ({"novelty__enabled": "true"}, "novelty.enabled: expected False with tree.enabled"),
        ({"loss__scale": "group"}, "loss.scale: expected 'batch' with tree.enabled"),
        ({"tree__min_fanout": "5", "tree__max_fanout": "4"}, "tree.max_fanout: expected at least"),
    ],
)
def test_what_contradicts_a_tree_exits_2(
    changes: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, **changes)) == 2
    assert message in " ".join(capsys.readouterr().err.split())

"""Study files and run folders with made-up numbers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from xrpo_fast.config_file import dump_config
from xrpo_fast.study.plan import PlannedRun

BASE = """
[run]
steps = 4
threads = 1
[rollout]
engine = "transformers"
prompts_per_step = 12
rollouts_per_prompt = 6
max_response_tokens = 36
[planner]
base_rollouts = 3
[reward]
functions = ["builtin:symbols"]
workers = 0
[optim]
learning_rate = 5e-4
[eval]
every_steps = 2
samples = 1
final_samples = 2
max_prompts = 6
k = [1, 2]
[checkpoint]
every_steps = 2
"""

ARMS = """
[arms.xrpo]
algorithm = "xrpo"
[arms.grpo]
algorithm = "grpo"
"""


@pytest.fixture
def write_study(tmp_path) -> Callable[..., Path]:
    """write_study(head, arms): a study file beside its base config; head goes on top."""

    def write(head: str = "", arms: str = ARMS, base: str = BASE) -> Path:
        (tmp_path / "base.toml").write_text(base)
        given = {line.partition("=")[0].strip() for line in head.splitlines()}
        defaults = {
            "base": '"base.toml"',
            "output_dir": json.dumps(str(tmp_path / "out")),
            "seeds": "[0, 1]",
            "targets": "[0.5, 0.9]",
        }
        lines = [f"{key} = {value}" for key, value in defaults.items() if key not in given]
        path = tmp_path / "study.toml"
        path.write_text("\n".join([*lines, head, arms]))
        return path

    return write


@pytest.fixture(scope="session")
def write_run() -> Callable[..., None]:
    """write_run(run, accuracies): a finished run's folder, evaluated every second step."""

    def write(run: PlannedRun, accuracies: Sequence[float], **changes: float) -> None:
        run.path.mkdir(parents=True)
        (run.path / "config.toml").write_text(dump_config(run.config))
        lines = [json.dumps(row) for row in metric_rows(accuracies, **changes)]
        (run.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    return write


def metric_rows(accuracies: Sequence[float], **changes: float) -> list[dict]:
    """Rows of steps 0, 1, 2, ...; accuracies are those of steps 0, 2, 4, ..."""
    rows = []
    for step in range(2 * len(accuracies) - 1):
        row: dict = {"step": step}
        if step:
            row |= {
                "planner/rollouts": 72,
                "tokens/generated": 100 * step,
                "timing_s/step": 0.5,
                "groups/zero_variance_frac": 0.25,
                "grad_norm": 0.2,
                "icl/hopeless_prompts": 4,
                "icl/flipped_prompts": step % 3,
                "planner/gini": 0.1,
            }
        if step % 2 == 0:
            accuracy = accuracies[step // 2]
            row |= {
                "eval/heldout/pass@1": accuracy,
                "eval/heldout/pass@1/low": accuracy - 0.1,
                "eval/heldout/pass@1/high": accuracy + 0.1,
                "eval/heldout/pass@2": accuracy + 0.05,
                "eval/heldout/cons@2": accuracy + 0.02,
                "eval/heldout/tier/vhard/pass@1": accuracy / 2,
                "eval/heldout/mean_length": 11.0,
                "eval/heldout/samples": 2,
            }
        rows.append(row | {key.replace("__", "/"): v for key, v in changes.items() if key in row})
    return rows

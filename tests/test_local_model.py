"""Any Hugging Face folder and any JSONL file, rolled out by real vLLM on the CPU."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.small_run import MADE_OF_THREE, comparable, make_tiny_model
from xrpo_fast.evaluate import main as evaluate
from xrpo_fast.metrics import read_metrics
from xrpo_fast.train import main

CONFIG = Path(__file__).parent.parent / "examples" / "local_model.toml"


@pytest.fixture(autouse=True)
def _vllm(require: Callable[[str], None]) -> None:
    require("vllm")


def arguments(tmp_path: Path, architecture: str, **changes: str) -> list[str]:
    model = make_tiny_model(tmp_path / "model", architecture)
    data = tmp_path / "train.jsonl"
    rows = [{"question": f"w{i} w{i + 1}", "answer": "1", "note": "x"} for i in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "run.output_dir": str(tmp_path / "runs"),
        "run.steps": "3",
        "model.path": str(model),
        "data.train": str(data),
        "data.eval": f'{{ held = "{data}" }}',
        "data.instruction": "w7 w8",
        "rollout.engine": "vllm",
        "rollout.prompts_per_step": "7",
        "rollout.rollouts_per_prompt": "5",
        "rollout.max_response_tokens": "12",
        "rollout.temperature": "0.8",
        "rollout.max_concurrent": "16",
        "rollout.gpu_memory_fraction": "0.05",
        "reward.functions": '["tests.small_run:parity_reward"]',
        "reward.workers": "1",
        "optim.learning_rate": "1e-3",
        "optim.warmup_steps": "0",
        "eval.samples": "1",
        "eval.final_samples": "2",
        "eval.k": "[1]",
        "eval.max_prompts": "4",
        "checkpoint.every_steps": "2",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return [str(CONFIG), *(word for key, value in values.items() for word in (f"--{key}", value))]


@pytest.mark.parametrize(
    ("architecture", "allocation"), [("llama", "proportional"), ("qwen3", "streaming")]
)
def test_vllm_rolls_out_what_the_trainer_trains(
    architecture: str, allocation: str, tmp_path: Path
) -> None:
    assert main(arguments(tmp_path, architecture, planner__allocation=allocation)) == 0
    rows = read_metrics(tmp_path / "runs" / "local_model" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["planner/rollouts"] == 35
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["updates"] > 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = tmp_path / "runs" / "local_model" / "checkpoints" / "step_3"
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template


def test_stale_weights_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from xrpo_fast.rollouts.vllm import VllmEngine

    monkeypatch.setattr(VllmEngine, "load_weights", lambda self, state_dict: None)
    assert main(arguments(tmp_path, "llama", optim__learning_rate="1e-2")) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "expected sampler and trainer log-probs to agree" in error


def test_a_streaming_run_is_resumed_exactly(tmp_path: Path) -> None:
    """Which prompt is rolled out next depends on what finished before, in vLLM's order."""
    found = {}
    for name, halves in (("whole", [["4"]]), ("resumed", [["2"], ["4", "--resume"]])):
        for steps, *flags in halves:
            words = arguments(
                tmp_path,
                "llama",
                run__name=name,
                run__steps=steps,
                planner__allocation="streaming",
                log__rollout_text="0",
            )
            assert main([*words, *flags]) == 0
        folder = tmp_path / "runs" / name
        files = [folder / "rollouts" / f"step_{step}.parquet" for step in (3, 4)]
        found[name] = (
            comparable(read_metrics(folder / "metrics.jsonl"))[3:],
            [pq.read_table(file).to_pylist() for file in files],
        )
    assert [row["step"] for row in found["whole"][0]] == [3, 4]
    orders = [[rollout["finish_order"] for rollout in step] for step in found["whole"][1]]
    assert all(order != sorted(order) for order in orders)
    assert found["resumed"] == found["whole"]


def test_evaluation_by_vllm_votes_on_answers_as_mathematics(tmp_path: Path) -> None:
    data = tmp_path / "math.jsonl"
    rows = [{"question": f"w{i} w{i + 1}", "answer": "3"} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = arguments(
        tmp_path,
        "llama",
        data__eval=f'{{ held = "{data}" }}',
        reward__functions='["math"]',
        eval__max_prompts="0",
    )
    assert evaluate(["--out", str(tmp_path / "out"), "--samples", "6", "--k", "1,6", *flags]) == 0
    metrics = json.loads((tmp_path / "out" / "result.json").read_text())["sets"]["held"]["metrics"]
    samples = pq.read_table(tmp_path / "out" / "samples_held.parquet").to_pylist()
    assert len(samples) == 48
    answers = [re.findall(r"\\boxed\{(.*?)\}(?= |$)", sample["response"]) for sample in samples]
    is_three = [bool(found) and found[-1] in MADE_OF_THREE for found in answers]
    assert [sample["solved"] for sample in samples] == is_three
    assert metrics["pass@1"] == pytest.approx(sum(is_three) / 48)
    # Ways to write 3 vote together, each other answer alone: 4, 5, or a tie with them.
    expected = []
    for first in range(0, 48, 6):
        votes = Counter(
            "3" if found[-1] in MADE_OF_THREE else found[-1]
            for found in answers[first : first + 6]
            if found
        )
        leaders = [answer for answer, n in votes.items() if n == max(votes.values())]
        expected.append(leaders.count("3") / len(leaders) if leaders else 0.0)
    assert 0 < sum(expected) < 8
    assert metrics["cons@6"] == pytest.approx(sum(expected) / 8)

"""python -m xrpo_fast.train: exit codes, messages and what is left on disk."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from tests.small_run import CONFIG, make_tiny_model, small_arguments
from xrpo_fast.checkpoint import save_checkpoint
from xrpo_fast.config_file import make_config
from xrpo_fast.metrics import read_metrics
from xrpo_fast.prompt_sampler import PromptSampler
from xrpo_fast.train import main, run_and_exit
from xrpo_fast.trainer import Trainer

ROOT = Path(__file__).parent.parent


def test_small_run_leaves_everything_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_arguments(tmp_path)) == 0
    run = tmp_path / "quickstart"
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4]["updates"] > 0
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step_2", "step_4"}
    for name in ("config.toml", "log.txt", "report.html", "learning_curve_heldout.png"):
        assert (run / name).stat().st_size > 0, name
    assert len(list((run / "rollouts").glob("step_*.parquet"))) == 4
    output = capsys.readouterr().out
    assert "Held-out accuracy" in output
    assert "Where the rollouts went" in output
    assert "Seconds per step" in output


def test_timings_add_up_to_the_step(tmp_path: Path) -> None:
    assert main(small_arguments(tmp_path, run__steps="2")) == 0
    row = read_metrics(tmp_path / "quickstart" / "metrics.jsonl")[-1]
    parts = sum(
        value
        for key, value in row.items()
        if key.startswith("timing_s/") and key != "timing_s/step"
    )
    assert parts == pytest.approx(row["timing_s/step"])


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "gspo", "gspo_token", "dapo", "treepo"])
def test_every_baseline_trains(algorithm: str, tmp_path: Path) -> None:
    text = f'algorithm = "{algorithm}"\n' + CONFIG.read_text().split("\n", 4)[4]
    config = tmp_path / "baseline.toml"
    config.write_text(text)
    arguments = small_arguments(tmp_path, run__steps="2", planner__base_rollouts="0")
    assert main([str(config), *arguments[1:]]) == 0
    row = read_metrics(tmp_path / "baseline" / "metrics.jsonl")[-1]
    assert row["updates"] > 0
    assert row["icl/seeded_rollouts"] == 0
    assert "novelty/bonus_mean" not in row


def test_dynamic_sampling_trains_on_groups_with_signal_and_loses_no_prompt(tmp_path: Path) -> None:
    text = 'algorithm = "dapo"\n' + CONFIG.read_text().split("\n", 4)[4]
    config = tmp_path / "dapo.toml"
    config.write_text(text)
    arguments = small_arguments(tmp_path, run__steps="3", planner__base_rollouts="0")
    assert main([str(config), *arguments[1:]]) == 0
    run = tmp_path / "dapo"
    order: list[int] = []
    for row in read_metrics(run / "metrics.jsonl")[1:]:
        table = pq.read_table(run / "rollouts" / f"step_{row['step']}.parquet").to_pylist()
        groups = {rollout["group"]: rollout["prompt_index"] for rollout in table}
        order += [groups[position] for position in range(len(groups))]
        # Six prompts start, at most six replace those without signal; all rollouts are charged.
        assert 6 <= len(groups) <= 12
        assert row["planner/rollouts"] == 6 * len(groups)
        rewards = [
            [r["reward"] for r in table if r["group"] == position]
            for position in range(len(groups))
        ]
        tokens = sum(r["num_tokens"] for r in table if len(set(rewards[r["group"]])) > 1)
        assert row["tokens/trained"] == tokens
        # No prompt is rolled out again after its first round, so none counts as hopeless.
        assert row["icl/hopeless_prompts"] == 0
    assert order == PromptSampler(544, seed=0).next_batch(len(order))


def test_resting_prompts_are_passed_over_unless_nothing_else_is_left() -> None:
    def drawn(num_prompts: int, per_step: int, num_steps: int = 12) -> tuple[list[list[int]], int]:
        trainer = SimpleNamespace(
            config=make_config({"rollout": {"prompts_per_step": per_step}}),
            prompts=list(range(num_prompts)),
            sampler=PromptSampler(num_prompts, seed=0),
            states=SimpleNamespace(should_skip=lambda index, epoch: index < 4),
        )
        steps = [Trainer._draw_prompts(trainer) for _ in range(num_steps)]  # pyright: ignore
        return steps, trainer.sampler.epoch

    few, _ = drawn(24, 5)
    assert all(len(set(step)) == 5 and min(step) >= 4 for step in few)
    # The step takes the whole data set: all prompts, once each, one epoch per step.
    whole, epoch = drawn(24, 24)
    assert all(sorted(step) == list(range(24)) for step in whole)
    assert epoch == 11


@pytest.mark.parametrize("train_prompt", ["original", "seeded", "original_shaped", "baseline_only"])
def test_every_train_prompt_mode_trains(train_prompt: str, tmp_path: Path) -> None:
    assert main(small_arguments(tmp_path, icl__train_prompt=train_prompt, run__steps="3")) == 0
    rows = read_metrics(tmp_path / "quickstart" / "metrics.jsonl")
    assert sum(row.get("icl/seeded_rollouts", 0) for row in rows) > 0
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in rows[1:])


def test_kl_penalty_and_mismatch_correction(tmp_path: Path) -> None:
    arguments = small_arguments(
        tmp_path, run__steps="2", loss__kl_weight="0.1", loss__mismatch="tis"
    )
    assert main(arguments) == 0
    row = read_metrics(tmp_path / "quickstart" / "metrics.jsonl")[-1]
    assert row["kl"] > 0


def test_reused_run_name_is_an_error_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_arguments(tmp_path, run__steps="1")) == 0
    before = (tmp_path / "quickstart" / "metrics.jsonl").read_text()
    assert main(small_arguments(tmp_path, run__steps="1")) == 2
    assert "use --resume to go on" in capsys.readouterr().err.replace("\n", " ")
    assert (tmp_path / "quickstart" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_run_that_is_at_work_is_left_alone(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_arguments(tmp_path, run__steps="1")) == 0
    run = tmp_path / "quickstart"
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(small_arguments(tmp_path, flag, run__steps="2")) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "run.output_dir: expected no other run at work in" in error
    assert "wait for it, stop it, or choose another run.name" in error
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    assert main(small_arguments(tmp_path, flag, run__steps="1")) == 0


def test_a_run_at_work_holds_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []
    real = save_checkpoint

    def start_another(*arguments: object, **named: object) -> object:
        # A second run of the same name, from before the first took the folder.
        codes.append(main(small_arguments(tmp_path, "--resume", run__steps="1")))
        return real(*arguments, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr("xrpo_fast.session.save_checkpoint", start_another)
    assert main(small_arguments(tmp_path, run__steps="1")) == 0
    assert codes == [2]


@pytest.mark.parametrize("enabled", ["true", "false"], ids=["icl", "no-icl"])
def test_output_folder_that_cannot_be_written_is_named(
    enabled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"question": "w{i} w1 w2", "answer": "3"}}\n' for i in range(16))
    )
    (tmp_path / "file").write_text("")
    arguments = small_arguments(
        tmp_path / "file" / "runs",
        model__path=str(model),
        data__train=str(tmp_path / "rows.jsonl"),
        reward__functions='["exact"]',
        icl__enabled=enabled,
    )
    assert main(arguments) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "run.output_dir: expected a writable folder" in error
    assert "--resume" not in error


def test_overwrite_with_a_typo_loses_nothing(tmp_path: Path) -> None:
    assert main(small_arguments(tmp_path, run__steps="1")) == 0
    wrong = small_arguments(tmp_path, "--overwrite", data__train="/nowhere.jsonl")
    assert main(wrong) == 2
    assert (tmp_path / "quickstart" / "checkpoints" / "step_1" / "COMPLETE").exists()
    assert main(small_arguments(tmp_path, "--overwrite", run__steps="1")) == 0


def test_traceback_of_a_failure_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("xrpo_fast.session.write_rollouts", fail)
    assert main(small_arguments(tmp_path, run__steps="1")) == 1
    assert "KeyError: 'lost'" in capsys.readouterr().err
    assert "Traceback" in (tmp_path / "quickstart" / "log.txt").read_text()


@pytest.mark.parametrize("fails_in", [2, 3], ids=["no-checkpoint", "checkpoint-of-step-2"])
def test_engine_that_dies_ends_the_run_and_says_where_to_go_on(
    fails_in: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from xrpo_fast.rollouts.transformers import TransformersEngine

    real = TransformersEngine.step

    def step(engine: TransformersEngine) -> object:
        if (tmp_path / "quickstart" / "rollouts" / f"step_{fails_in - 1}.parquet").exists():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(engine)

    monkeypatch.setattr(TransformersEngine, "step", step)
    # Evaluations are out of the way: they would be the first to need the engine after a step.
    assert main(small_arguments(tmp_path, eval__every_steps="0")) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "error: CUDA out of memory.; lower rollout.gpu_memory_fraction" in error
    assert ("go on from it with --resume" in error) == (fails_in == 3)
    assert ("checkpoints/step_2" in error.replace(" ", "")) == (fails_in == 3)
    monkeypatch.undo()
    if fails_in == 3:
        assert main(small_arguments(tmp_path, "--resume", eval__every_steps="0")) == 0
    else:
        assert main(small_arguments(tmp_path, "--resume", eval__every_steps="0")) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert "ended before its first, at step 2 (checkpoint.every_steps)" in error
        assert "start over with --overwrite" in error


def test_exemplar_report_is_written_with_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise RuntimeError("the end never comes")

    monkeypatch.setattr("xrpo_fast.session.Session._finish", fail)
    assert main(small_arguments(tmp_path, run__steps="2")) == 1
    found = json.loads((tmp_path / "quickstart" / "exemplars.json").read_text())
    assert found.keys() == {"leakage", "suspect_prompts"}


def test_gradient_that_is_not_finite_stops_the_run_unsaved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *a, **k: torch.tensor(float("nan"))
    )
    assert main(small_arguments(tmp_path, run__steps="2", checkpoint__every_steps="1")) == 1
    assert "expected a finite grad_norm" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "quickstart" / "checkpoints").exists()


def test_resume_without_a_checkpoint_fails_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_arguments(tmp_path, "--resume")) == 2
    assert "expected the run folder" in capsys.readouterr().err


def test_resume_with_another_seed_is_refused_and_a_lower_learning_rate_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_arguments(tmp_path, run__steps="2")) == 0
    assert main(small_arguments(tmp_path, "--resume", run__seed="7")) == 2
    assert "run.seed: expected 0" in capsys.readouterr().err
    # What a run that diverged is told to do.
    lower = {"run__steps": "3", "optim__learning_rate": "1e-4"}
    assert main(small_arguments(tmp_path, "--resume", **lower)) == 0
    rows = read_metrics(tmp_path / "quickstart" / "metrics.jsonl")
    assert [row["learning_rate"] for row in rows[1:]] == [5e-4, 5e-4, 1e-4]


def test_run_that_trains_nothing_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No response of one token can be right, so every group is dead.
    arguments = small_arguments(tmp_path, run__steps="2", rollout__max_response_tokens="1")
    assert main(arguments) == 1
    assert "at least one optimizer update" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")],
    ids=["ours", "the user's count", "the user's policy"],
)
def test_threads_sleep_soon_unless_the_user_says_otherwise(given, expected) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    found = subprocess.run(
        [sys.executable, "-m", "xrpo_fast.train", str(CONFIG), "--dry-run"],
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **given},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in found.stderr


def test_dry_run_checks_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_arguments(tmp_path, "--dry-run")) == 0
    output = capsys.readouterr().out
    assert "203,200 parameters" in output
    assert "learning_rate = 0.0005" in output
    assert not any(tmp_path.iterdir())


def test_dry_run_sees_weights_that_are_cut_off(tmp_path: Path, capsys) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(small_arguments(tmp_path / "out", "--dry-run", model__path=str(model))) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "model.path: expected whole weights in" in message
    assert "download the model again" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__path": "/nowhere/at/all"}, "model.path: expected a Hugging Face model folder"),
        ({"data__train": "/nowhere.jsonl"}, "/nowhere.jsonl"),
        ({"reward__functions": '"math"'}, "expected a list, got 'math'; write [\"math\"]"),
        ({"icl__embedder": "no/such/one"}, "icl.embedder: expected 'tfidf', 'codes' or an"),
        ({"optim__lr": "1e-3"}, "here it is called optim.learning_rate"),
        ({"rollout__rolouts_per_prompt": "4"}, "did you mean rollout.rollouts_per_prompt"),
        (
            {"rollout__temperature": "-1"},
            "rollout.temperature: expected greater than or equal to 0.01, got -1",
        ),
        ({"rollout__max_response_tokens": "9999"}, "the model holds 256 tokens"),
        ({"planner__base_rollouts": "50"}, "planner.base_rollouts: expected at most"),
        ({"planner__allocation": "streaming"}, "streaming"),
        ({"planner__allocation": "uniform"}, "icl.enabled: expected a planner.allocation"),
        ({"planner__max_rollouts_per_prompt": "1"}, "planner.max_rollouts_per_prompt"),
        ({"eval__k": "[64]"}, "eval.k: expected at most eval.final_samples"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unusable_configuration_exits_2(
    changes: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_arguments(tmp_path, **changes)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not any(tmp_path.iterdir()), "a failed start takes no run name"


def test_ctrl_c_saves_a_checkpoint_and_exits_130(tmp_path: Path) -> None:
    arguments = small_arguments(tmp_path, run__steps="500", checkpoint__every_steps="499")
    process = subprocess.Popen(
        [sys.executable, "-m", "xrpo_fast.train", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = tmp_path / "quickstart" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and '"step": 2' not in _read(metrics):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    steps = [json.loads(line)["step"] for line in _read(metrics).splitlines()]
    checkpoints = [path.name for path in (tmp_path / "quickstart" / "checkpoints").iterdir()]
    assert checkpoints == [f"step_{steps[-1]}"]


def test_a_second_ctrl_c_says_that_nothing_more_was_saved(capsys) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        run_and_exit(interrupted)
    assert "stopped at once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("writer", "step", "name"),
    [
        ("session.save_checkpoint", 4, "checkpoints/step_4"),
        ("session.write_rollouts", 1, "rollouts/step_1.parquet"),
        ("session.write_rollouts", 3, "rollouts/step_3.parquet"),
        ("metrics.MetricsWriter.write", 3, "metrics.jsonl"),
    ],
    ids=["checkpoint", "first-rollouts", "rollouts", "metrics"],
)
def test_full_disk_names_the_file_and_keeps_the_last_checkpoint(
    writer: str, step: int, name: str, tmp_path: Path
) -> None:
    # RLIMIT_FSIZE makes every larger write fail, as a full disk does.
    owner, _, method = writer.rpartition(".")
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "import xrpo_fast.session, xrpo_fast.metrics\n"
        f"owner = xrpo_fast.{owner}\n"
        f"real = owner.{method}\n"
        "def full(first, step, *rest, **named):\n"
        f"    if step == {step}: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "    return real(first, step, *rest, **named)\n"
        f"owner.{method} = full\n"
        "from xrpo_fast.train import main\n"
        f"sys.exit(main({small_arguments(tmp_path)!r}))\n"
    )
    dead = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    run = tmp_path / "quickstart"
    assert dead.returncode == 1, dead.stderr
    assert "Logging error" not in dead.stderr
    assert "Traceback" not in dead.stderr
    message = "".join(dead.stderr.split())
    assert f"expectedtowrite{run / name},got" in message
    assert "freespace" in message
    assert ("--resume" in message) == (step > 2)
    assert (run / "checkpoints" / "step_2" / "COMPLETE").exists() == (step > 2)
    assert not (run / "checkpoints" / "step_4").exists()
    if step == 3:
        assert main(small_arguments(tmp_path, "--resume")) == 0


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""

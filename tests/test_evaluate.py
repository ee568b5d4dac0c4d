"""python -m xrpo_fast.evaluate on the built-in task: results, resuming, comparing, exit codes."""

import json
import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.small_run import make_tiny_model
from xrpo_fast.checkpoint import save_checkpoint
from xrpo_fast.config_file import dump_config, load_config
from xrpo_fast.evaluate import cons_at_k, main, pass_at_k
from xrpo_fast.evaluator import Evaluator

CONFIG = Path(__file__).parent.parent / "examples" / "quickstart.toml"
NUM_QUESTIONS, NUM_SAMPLES = 12, 4


def words(target: Path, out: Path | None, *flags: str, samples: int = NUM_SAMPLES) -> list[str]:
    """A small evaluation's command line."""
    where = ["--out", str(out)] if out else []
    small = ["--eval.max_prompts", str(NUM_QUESTIONS), "--samples", str(samples)]
    return [str(target), *where, *small, *flags]


def result_of(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


def rows_of(out: Path) -> list[dict]:
    return pq.read_table(out / "samples_heldout.parquet").to_pylist()


def flat(text: str) -> str:
    """Console output without the line breaks of its width."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    """The folder of one small evaluation of the shipped policy; tests only read it."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    assert main(words(CONFIG, out)) == 0
    return out


@pytest.fixture(scope="module")
def other_run(tmp_path_factory) -> Path:
    """A run folder whose checkpoint is the shipped policy with a worse output head."""
    import torch

    from xrpo_fast.policy import load_policy

    run = tmp_path_factory.mktemp("runs") / "other"
    run.mkdir()
    config = load_config(CONFIG, [("run.name", "other"), ("run.output_dir", str(run.parent))])
    (run / "config.toml").write_text(dump_config(config))
    policy = load_policy(config.model, temperature=1.0, device=torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2 * parameter.std())
    for step in (2, 7):
        save_checkpoint(
            run / "checkpoints", step, policy=policy, optimizer_state={}, state={}, keep=2
        )
    return run


def test_metrics_are_those_of_the_samples(evaluated):
    rows = rows_of(evaluated)
    assert len(rows) == NUM_QUESTIONS * NUM_SAMPLES
    metrics = result_of(evaluated)["sets"]["heldout"]["metrics"]
    by_question: dict[str, list[dict]] = {}
    for row in rows:
        by_question.setdefault(row["prompt_id"], []).append(row)
    assert len(by_question) == NUM_QUESTIONS
    groups = list(by_question.values())

    def mean(values):
        return sum(values) / len(groups)

    for k in (1, NUM_SAMPLES):
        expected = mean([pass_at_k(len(g), sum(r["solved"] for r in g), k) for g in groups])
        assert metrics[f"pass@{k}"] == pytest.approx(expected)
    assert metrics[f"avg@{NUM_SAMPLES}"] == metrics["pass@1"]
    voted = mean(
        [cons_at_k([r["extracted"] for r in g], [r["solved"] for r in g], len(g)) for g in groups]
    )
    assert metrics[f"cons@{NUM_SAMPLES}"] == pytest.approx(voted)
    for name in ("avg@4", "pass@1", "pass@4", "cons@4"):
        assert metrics[f"{name}/low"] <= metrics[name] <= metrics[f"{name}/high"]
    lengths = sorted(row["num_tokens"] for row in rows)
    assert metrics["mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert metrics["max_length"] == lengths[-1]
    assert lengths[0] <= metrics["median_length"] <= metrics["p95_length"] <= lengths[-1]
    assert 0 < metrics["pass@1"] < 1, "a policy that is always right or wrong would show nothing"


def test_samples_hold_what_the_grader_saw(evaluated):
    from xrpo_fast.tasks import symbols

    for row in rows_of(evaluated):
        assert row["solved"] == symbols.verify(row["response"], row["answer"])
        assert row["reward"] == float(row["solved"])
        assert row["num_tokens"] == len(row["token_ids"])


def test_result_names_model_grader_and_sampling(evaluated):
    result = result_of(evaluated)
    assert result["model"] == "builtin:symbols"
    assert result["step"] is None
    assert "xrpo_fast 0" in result["grader"]["functions"]["builtin:symbols"]
    assert result["sampling"]["samples"] == NUM_SAMPLES
    assert result["sampling"]["temperature"] == 1.0
    assert result["sets"]["heldout"]["questions"] == NUM_QUESTIONS


def test_same_samples_again_are_not_generated_and_give_the_same_bytes(
    evaluated, tmp_path, monkeypatch, capsys
):
    out = Path(shutil.copytree(evaluated, tmp_path / "out"))

    def stream(*_):
        raise AssertionError("all samples are there already")

    monkeypatch.setattr(Evaluator, "stream", stream)
    assert main(words(CONFIG, out)) == 0
    for name in ("result.json", "samples_heldout.parquet"):
        assert (out / name).read_bytes() == (evaluated / name).read_bytes()
    output = capsys.readouterr().out
    assert "48 of 48 samples are there already" in output
    assert "pass@1" in output
    assert "cons@4" in output
    assert "graded by builtin:symbols" in flat(output)


def test_evaluation_that_was_broken_off_goes_on_to_the_same_result(
    evaluated, tmp_path, monkeypatch, capsys
):
    stream = Evaluator.stream

    def stopped_after_ten(self, prompts, wanted):
        for number, sample in enumerate(stream(self, prompts, wanted)):
            if number == 10:
                raise KeyboardInterrupt
            yield sample

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "stream", stopped_after_ten)
        assert main(words(CONFIG, tmp_path)) == 130
    assert "the same command goes on" in flat(capsys.readouterr().out)
    assert len(rows_of(tmp_path)) == 10
    assert not (tmp_path / "result.json").exists()
    wanted_later = []

    def counted(self, prompts, wanted):
        wanted_later.extend(wanted)
        return stream(self, prompts, wanted)

    monkeypatch.setattr(Evaluator, "stream", counted)
    assert main(words(CONFIG, tmp_path)) == 0
    assert len(wanted_later) == NUM_QUESTIONS * NUM_SAMPLES - 10
    assert rows_of(tmp_path) == rows_of(evaluated)
    assert result_of(tmp_path) == result_of(evaluated)


def test_more_samples_are_added_and_fewer_are_read(evaluated, tmp_path):
    assert main(words(CONFIG, tmp_path, samples=2)) == 0
    assert "pass@4" not in result_of(tmp_path)["sets"]["heldout"]["metrics"]
    assert main(words(CONFIG, tmp_path, samples=4)) == 0
    assert result_of(tmp_path) == result_of(evaluated)
    assert main(words(CONFIG, tmp_path, samples=1)) == 0
    assert result_of(tmp_path)["sets"]["heldout"]["metrics"]["samples"] == 1
    assert len(rows_of(tmp_path)) == NUM_QUESTIONS * NUM_SAMPLES, "none is thrown away"


def test_run_folder_is_evaluated_at_its_latest_checkpoint(other_run, evaluated, capsys):
    assert main(words(other_run, None, "--against", str(evaluated))) == 0
    (out,) = (other_run / "evaluations").iterdir()
    result = result_of(out)
    assert result["step"] == 7
    assert result["model"] == str(other_run / "checkpoints" / "step_7")
    mine, other = result["sets"]["heldout"], result_of(evaluated)["sets"]["heldout"]
    assert mine["samples_fingerprint"] != other["samples_fingerprint"]
    gaps = result["against"]["sets"]["heldout"]
    for name in ("pass@1", "pass@4", "cons@4", "mean_length"):
        expected = mine["metrics"][name] - other["metrics"][name]
        assert gaps[name] == pytest.approx(expected), name
        assert gaps[f"{name}/low"] <= gaps[name] <= gaps[f"{name}/high"]
    assert gaps["pass@1"] < 0
    assert "minus builtin:symbols" in flat(capsys.readouterr().out)


def test_against_a_run_takes_its_evaluation_of_the_same_questions(other_run, evaluated, tmp_path):
    if not (other_run / "evaluations").exists():
        assert main(words(other_run, None)) == 0
    out = Path(shutil.copytree(evaluated, tmp_path / "out"))
    assert main(words(CONFIG, out, "--against", str(other_run))) == 0
    against = result_of(out)["against"]
    assert Path(against["result"]).parent.parent == other_run / "evaluations"
    assert against["sets"]["heldout"]["pass@1"] > 0


def test_against_itself_there_is_no_difference(evaluated, tmp_path):
    out = Path(shutil.copytree(evaluated, tmp_path / "out"))
    assert main(words(CONFIG, out, "--against", str(evaluated / "result.json"))) == 0
    gaps = result_of(out)["against"]["sets"]["heldout"]
    assert gaps["pass@1"] == gaps["mean_length"] == 0
    assert gaps["pass@1/low"] < 0 < gaps["pass@1/high"]


def test_model_and_data_from_the_command_line(other_run, tmp_path):
    model = other_run / "checkpoints" / "step_2"
    flags = ("--model", str(model), "--data", "builtin:symbols?seed=3", "--k", "1,2")
    assert main(words(CONFIG, tmp_path, *flags, samples=2)) == 0
    result = result_of(tmp_path)
    assert result["model"] == str(model)
    assert set(result["sets"]) == {"symbols"}
    assert "pass@2" in result["sets"]["symbols"]["metrics"]


def test_evaluating_a_config_leaves_the_name_of_its_run_free(tmp_path):
    assert main(words(CONFIG, None, "--run.output_dir", str(tmp_path), samples=1)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["evaluations"]
    (out,) = (tmp_path / "evaluations").iterdir()
    assert out.name.startswith("quickstart-builtin_symbols-")


def test_it_says_what_it_chose(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(words(CONFIG, tmp_path / "out", "--rollout.engine", "auto")) == 0
    assert "rollout.engine" in capsys.readouterr().out


@pytest.mark.parametrize("is_think_prefilled", [False, True])
def test_a_response_within_the_thought_that_its_prompt_opens_is_not_solved(
    tmp_path, is_think_prefilled
):
    """As in training, and recorded: samples that were graded otherwise are not reused."""
    from transformers import AutoTokenizer

    model = make_tiny_model(tmp_path / "model", "llama")
    if is_think_prefilled:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template += " <think>"
        tokenizer.save_pretrained(model)
    data = tmp_path / "held.jsonl"
    data.write_text("".join(f'{{"question": "w{i} w{i + 1}", "answer": "3"}}\n' for i in range(8)))
    values = {
        "model.path": str(model),
        "data.train": str(data),
        "data.eval": f'{{ heldout = "{data}" }}',
        "rollout.engine": "transformers",
        "rollout.max_response_tokens": "16",
        "reward.functions": '["exact"]',
    }
    flags = [word for key, value in values.items() for word in (f"--{key}", value)]
    assert main(words(CONFIG, tmp_path / "out", *flags, samples=16)) == 0
    rows = rows_of(tmp_path / "out")
    assert any("\\boxed{3}" in row["response"] for row in rows)
    assert any(row["solved"] for row in rows) is not is_think_prefilled
    sampling = result_of(tmp_path / "out")["sampling"]
    assert sampling["is_think_prefilled"] is is_think_prefilled


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--k", "1,8"], "--k: expected 1 to --samples = 4, got 1,8"),
        (["--k", "0"], "--k: expected 1 to --samples = 4, got 0"),
        (["--k", "few"], "--k: expected numbers as in 1,4,32, got 'few'"),
        (["--samples", "0"], "--samples: expected at least 1, got 0"),
        (
            ["--rollout.temperature", "0"],
            "rollout.temperature: expected greater than or equal to 0.01",
        ),
        (["--eval.sampels", "3"], "did you mean eval.samples?"),
        (["extra"], "command line: expected --section.key value, got 'extra'"),
        (["--model", str(CONFIG.parent)], "model.path: expected a Hugging Face model"),
        (
            ["--data", "nothing.jsonl"],
            "data.eval.nothing: expected a file, found none at 'nothing.jsonl'",
        ),
        (["--reward.functions", '["maths"]'], "reward.functions: expected one of math, code"),
        (["--reward.functions", '["math"]'], "reward.workers: expected >= 1 for ['math']"),
        (["--data.train", "x.jsonl"], "data.eval: expected at least one held-out set, got none"),
        (["--against", "nowhere"], "--against: expected a result.json, or a run"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_what_cannot_be_evaluated_exits_2_and_says_why(tmp_path, capsys, flags, message):
    assert main(words(CONFIG, tmp_path / "out", *flags)) == 2
    assert message in flat(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_runs(tmp_path, other_run, capsys):
    assert main(words(tmp_path, None)) == 2
    assert "CONFIG_OR_RUN: expected a TOML file or a run folder" in flat(capsys.readouterr().err)
    shutil.copy(other_run / "config.toml", tmp_path)
    assert main(words(tmp_path, None)) == 2
    assert "CONFIG_OR_RUN: expected a complete checkpoint" in flat(capsys.readouterr().err)
    assert main(words(tmp_path / "none.toml", None)) == 2
    assert "config: expected an existing file" in flat(capsys.readouterr().err)


def test_samples_of_another_evaluation_are_never_mixed_in(evaluated, tmp_path, capsys):
    out = Path(shutil.copytree(evaluated, tmp_path / "out"))
    assert main(words(CONFIG, out, "--rollout.temperature", "0.7")) == 2
    assert "--out: expected a new folder" in flat(capsys.readouterr().err)
    (out / "samples_heldout.parquet").write_bytes(b"not parquet")
    assert main(words(CONFIG, out)) == 2
    assert "samples: expected those of an evaluation" in flat(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["grader"].update(full_reward=0.5), "expected a result of the same grader"),
        (
            lambda r: r["sets"]["heldout"].update(questions_fingerprint="0"),
            "expected the same questions in set 'heldout'",
        ),
        (lambda r: r.update(sets={}), "expected a set among heldout"),
        (lambda r: r.pop("grader"), "expected the result of an evaluation"),
    ],
    ids=["grader", "questions", "sets", "other-json"],
)
def test_what_cannot_be_compared(evaluated, tmp_path, capsys, change, message):
    out = Path(shutil.copytree(evaluated, tmp_path / "out"))
    other = Path(shutil.copytree(evaluated, tmp_path / "other"))
    result = result_of(other)
    change(result)
    (other / "result.json").write_text(json.dumps(result))
    assert main(words(CONFIG, out, "--against", str(other))) == 2
    assert message in flat(capsys.readouterr().err)


def test_failure_while_sampling_exits_1_and_keeps_the_samples(tmp_path, monkeypatch, capsys):
    stream = Evaluator.stream

    def failing(self, prompts, wanted):
        yield next(stream(self, prompts, wanted))
        raise RuntimeError("engine: died")

    monkeypatch.setattr(Evaluator, "stream", failing)
    assert main(words(CONFIG, tmp_path, samples=1)) == 1
    assert "engine: died" in capsys.readouterr().err
    assert len(rows_of(tmp_path)) == 1


def test_unscored_samples_are_kept_as_such(evaluated, tmp_path):
    """NaN rewards survive the round trip; they count as not solved."""
    from xrpo_fast.eval_store import SampleFile, read_samples
    from xrpo_fast.types import Prompt, Verdict

    samples, fingerprint = read_samples(evaluated / "samples_heldout.parquet")
    object.__setattr__(samples[0], "verdict", Verdict(reward=math.nan, solved=False, error="died"))
    prompts = [
        Prompt(id=str(i), index=i, question="", token_ids=(), answer={"a": i}) for i in range(12)
    ]
    file = SampleFile(tmp_path / "samples_x.parquet", fingerprint)
    file.write(prompts, samples)
    again = file.read()
    assert math.isnan(again[0].verdict.reward)
    assert again[0].verdict.error == "died"
    assert again[1:] == samples[1:]

"""Real runs: a small study from start to end, broken off, resumed, failed."""

import fcntl
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from xrpo_fast.metrics import TAIL_BYTES
from xrpo_fast.study.__main__ import main
from xrpo_fast.study.children import Child
from xrpo_fast.study.runner import StudyDisplay, _last_row
from xrpo_fast.study.state import states_of
from xrpo_fast.study.study_file import load_study

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_study_runs_once_and_is_then_complete(write_study, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = write_study("[common]\nrun.steps = 2")
    assert main([str(path)]) == 0
    assert {state.kind for state in states_of(load_study(path)).values()} == {"finished"}
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [len(arm["runs"]) for arm in saved["arms"]] == [2, 2]
    assert saved["arms"][0]["runs"][0]["steps"] == [0, 2]
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*/metrics.jsonl")}
    capsys.readouterr()
    assert main([str(path)]) == 0
    assert "4 of 4 runs are there already" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in before}
    # A key that changes the numbers must not reuse them.
    path.write_text(path.read_text() + "[arms.grpo.optim]\nlearning_rate = 1e-3\n")
    assert main([str(path)]) == 2
    assert "arms.grpo: expected optim.learning_rate = 0.001" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_broken_off_goes_on_with_the_same_numbers(write_study, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = write_study("seeds = [0]", "[arms.xrpo]")
    assert main([str(path)]) == 0
    metrics = tmp_path / "out" / "xrpo-seed0" / "metrics.jsonl"
    whole = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = tmp_path / "out" / "xrpo-seed0" / "checkpoints" / "step_4"
    last.rename(tmp_path / "gone")
    metrics.write_text("".join(json.dumps(row) + "\n" for row in whole[:4]))
    state = states_of(load_study(path))["xrpo-seed0"]
    assert (state.kind, state.steps_done) == ("partial", 2)
    assert main([str(path)]) == 0
    again = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in again] == [0, 1, 2, 3, 4]
    assert [row.get("loss") for row in again] == [row.get("loss") for row in whole]


@pytest.mark.slow
def test_a_failed_run_is_reported_and_the_others_go_on(write_study, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    arms = "[arms.broken]\nicl.embedder = '/no/such/folder'\n[arms.grpo]\nalgorithm = 'grpo'"
    path = write_study("seeds = [0]\n[common]\nrun.steps = 2", arms)
    assert main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "broken-seed0: failed with exit code" in out
    assert "/no/such/folder" in out
    assert states_of(load_study(path))["grpo-seed0"].kind == "finished"
    assert "missing: broken-seed0: failed with exit code 2; its log in logs/ says why" in out


def test_a_run_that_trained_nothing_stays_failed(write_study, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    # One token is no answer: every reward is 0 and no group has a gradient.
    head = "seeds = [0]\n[common]\nrun.steps = 2\nrollout.max_response_tokens = 1"
    path = write_study(head, "[arms.grpo]\nalgorithm = 'grpo'")
    metrics = tmp_path / "out" / "grpo-seed0" / "metrics.jsonl"
    found = []
    for _ in range(2):
        assert main([str(path)]) == 1
        out = capsys.readouterr().out
        assert "grpo-seed0: failed with exit code 1; the end of" in out
        assert "expected at least one optimizer update" in " ".join(out.split())
        assert "runs are there already" not in out
        assert states_of(load_study(path))["grpo-seed0"].exit_code == 1
        text = (tmp_path / "out" / "results.md").read_text()
        assert "- grpo-seed0: failed with exit code 1; its log in logs/ says why" in text
        assert "No run is finished." in text
        found.append(metrics.read_text())
    assert "grpo-seed0: failed with exit code 1 before, goes on from step 2" in out
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("code", "is_stopped"),
    [("1", False), ("-signal.SIGSEGV", False), ("130", True), ("-signal.SIGINT", True)],
)
def test_a_crash_while_stopping_is_no_stop(write_study, tmp_path, capsys, code, is_stopped):
    study = load_study(write_study())
    death = f"code = {code}; os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os, signal, sys; signal.signal(2, signal.SIG_DFL); {death}"]
    )
    process.wait()
    log = tmp_path / "log.txt"
    log.write_text("what went wrong")
    with StudyDisplay(Console(), study.runs, states_of(study)) as display:
        child = Child(run=study.runs[0], process=process, log=log)
        assert display.ended(child, "heldout", is_stopping=True) is is_stopped
    out = capsys.readouterr().out
    assert ("stopped; the same command goes on with it" in out) is is_stopped
    assert ("what went wrong" in out) is not is_stopped


@pytest.fixture
def long_study(write_study, tmp_path):
    """A study process whose one run has done a step or two of very many, and its metrics."""
    path = write_study("seeds = [0]\n[common]\nrun.steps = 5000", "[arms.grpo]\nalgorithm='grpo'")
    process = subprocess.Popen(
        [sys.executable, "-m", "xrpo_fast.study", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = tmp_path / "out" / "grpo-seed0" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    yield path, process, metrics
    process.kill()


def test_ctrl_c_stops_the_run_with_a_checkpoint(long_study):
    path, process, metrics = long_study
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    assert "grpo-seed0: stopped; the same command goes on with it" in out
    state = states_of(load_study(path))["grpo-seed0"]
    assert state.kind == "partial"
    assert state.steps_done == json.loads(metrics.read_text().splitlines()[-1])["step"]


def test_a_second_ctrl_c_kills_the_run(long_study, tmp_path):
    process = long_study[1]
    process.send_signal(signal.SIGINT)
    for line in process.stdout:
        if "again to stop now" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    # A run that was still alive would hold the lock.
    with (tmp_path / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_is_asked_for_its_step_without_reading_what_came_before(tmp_path):
    # Bytes that are no text: reading them would be an error.
    end = b'\n{"step": 2999}\n{"step": 3000, "loss": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff" * 2 * TAIL_BYTES + end)
    assert _last_row(tmp_path) == {"step": 3000, "loss": 0.5}


def test_two_studies_do_not_share_a_folder(write_study, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main([str(write_study())]) == 2
    assert "output_dir: expected no other study at work in" in capsys.readouterr().err


def test_report_of_a_folder_that_cannot_be_written(write_study, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").mkdir()
    (tmp_path / "out" / "results.csv").mkdir()
    assert main([str(write_study()), "--report-only"]) == 2
    assert "output_dir: expected to write results into" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", [[], ["--report-only"]])
def test_a_missing_study_file_exits_with_2(tmp_path, capsys, flag):
    assert main([str(tmp_path / "none.toml"), *flag]) == 2
    assert "error: study: expected an existing file" in capsys.readouterr().err

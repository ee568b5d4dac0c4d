"""A run killed between any two writes and resumed gives the numbers of one that was not."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_run import comparable, small_arguments
from xrpo_fast.metrics import read_metrics
from xrpo_fast.train import main

ROOT = Path(__file__).parent.parent

KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"

# Each patches one write of step 3 or 4 so that the process dies there.
DEATHS = {
    "before-rollouts": """
import xrpo_fast.session as m
real = m.write_rollouts
def patched(path, step, *rest, **named):
    if step == 3: die()
    return real(path, step, *rest, **named)
m.write_rollouts = patched
""",
    "half-a-metrics-line": """
from xrpo_fast.metrics import MetricsWriter as W
real = W.write
def patched(self, step, values):
    if step == 3:
        self._file.write('{"step": 3, "rew'); self._file.flush(); die()
    real(self, step, values)
W.write = patched
""",
    "after-the-metrics-line": """
from xrpo_fast.metrics import MetricsWriter as W
real = W.write
def patched(self, step, values):
    real(self, step, values)
    if step == 4: die()
W.write = patched
""",
    "before-the-marker": """
import xrpo_fast.checkpoint as m
real = m._sync
def patched(folder):
    if folder.name.startswith('.step_4'): die()
    real(folder)
m._sync = patched
""",
    "after-the-checkpoint": """
import xrpo_fast.checkpoint as m
real = m.valid_checkpoints
def patched(folder):
    found = real(folder)
    if found[-1].name == 'step_4': die()
    return found
m.valid_checkpoints = patched
""",
}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("whole")
    assert main(small_arguments(folder, run__steps="6")) == 0
    return comparable(read_metrics(folder / "quickstart" / "metrics.jsonl"))


@pytest.mark.parametrize("death", DEATHS)
def test_killed_run_goes_on_with_the_same_numbers(
    death: str, whole_run: list[dict], tmp_path: Path
) -> None:
    script = f"def die():\n    {KILL}\n{DEATHS[death]}\nfrom xrpo_fast.train import main\n"
    arguments = small_arguments(tmp_path, run__steps="6")
    dead = subprocess.run(
        [sys.executable, "-c", f"{script}\nmain({arguments!r})"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert main([*arguments, "--resume"]) == 0
    rows = comparable(read_metrics(tmp_path / "quickstart" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [row["step"] for row in whole_run]
    assert rows == whole_run


def test_resumed_longer_run_equals_the_long_run(whole_run: list[dict], tmp_path: Path) -> None:
    assert main(small_arguments(tmp_path, run__steps="3")) == 0
    assert main(small_arguments(tmp_path, "--resume", run__steps="6")) == 0
    rows = comparable(read_metrics(tmp_path / "quickstart" / "metrics.jsonl"))
    after = [row for row in rows if row["step"] > 3]
    assert after == [row for row in whole_run if row["step"] > 3]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"icl__prompt_states": "true"}, "icl/state/seeded"),
        ({"planner__history": "true", "planner__allocation": "greedy"}, "planner/gini"),
    ],
    ids=["prompt states", "planner's history"],
)
def test_what_is_known_of_each_prompt_is_resumed(
    changes: dict[str, str], told: str, tmp_path: Path
) -> None:
    """Of 48 prompts, 24 a step: all have been seen before the run goes on."""
    size = {"data__limit": "48", "rollout__prompts_per_step": "24", **changes}
    found = {}
    for name, halves in (("whole", [["6"]]), ("resumed", [["4"], ["6", "--resume"]])):
        for steps, *flags in halves:
            more = {"run__name": name, "run__steps": steps, **size}
            assert main(small_arguments(tmp_path, *flags, **more)) == 0
        rows = comparable(read_metrics(tmp_path / name / "metrics.jsonl"))
        assert rows[4][told] > 0
        found[name] = rows[5:]
    assert [row["step"] for row in found["whole"]] == [5, 6]
    assert found["resumed"] == found["whole"]


def test_another_seed_gives_another_run(whole_run: list[dict], tmp_path: Path) -> None:
    assert main(small_arguments(tmp_path, run__steps="2", run__seed="1")) == 0
    rows = comparable(read_metrics(tmp_path / "quickstart" / "metrics.jsonl"))
    assert rows[1]["reward/mean"] != whole_run[1]["reward/mean"]
    assert rows[1]["tokens/prompt"] != whole_run[1]["tokens/prompt"]

"""The GPU script where there is no GPU, and the table that it prints."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpu_table():
    spec = importlib.util.spec_from_file_location("gpu_table", ROOT / "benchmarks/gpu_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _entry(workload: str, provider: str, median_ms: float, **extra: float) -> dict:
    device = {"gpu": "G", "torch": "2.11", "triton": "3.6", "copy_gb_per_s": 4000.0}
    info = {"workload": workload, "provider": provider, "median_ms": median_ms, "peak_mib": 1.0}
    return {"extra_info": {**info, **device, **extra}}


def test_our_rows_are_compared_with_the_best_rival_of_the_same_workload(gpu_table):
    entries = [
        _entry("b", "eager", 8.0),
        _entry("b", "ours", 2.0, gb_per_s=3000.0, copy_frac=0.75),
        _entry("b", "compile", 5.0),
        _entry("a", "ours, entropy", 1.0),
        _entry("a", "ours", 1.0),
    ]
    rows = gpu_table.read_rows({"benchmarks": entries})
    assert [row["workload"] for row in rows] == ["a", "a", "b", "b", "b"]
    assert {row["provider"]: row.get("speedup") for row in rows} == {
        "ours": 2.5,
        "ours, entropy": None,
        "eager": None,
        "compile": None,
    }
    lines = gpu_table.format_table(rows).splitlines()
    ours = next(line for line in lines if line.startswith("b") and " ours " in line)
    assert ours.split() == ["b", "ours", "2.0000", "2.50", "3000", "75.0", "1"]
    assert lines[-1] == "G, torch 2.11, triton 3.6; copy 4000 GB/s (read + write)"


def test_one_json_holds_rows_and_test_counts(tmp_path):
    benchmarks, out, tests = (tmp_path / name for name in ("b.json", "out.json", "tests.xml"))
    benchmarks.write_text(json.dumps({"benchmarks": [_entry("a", "ours", 1.0)]}))
    tests.write_text('<r><testsuite tests="5" failures="1" errors="0" skipped="2"/></r>')
    command = [sys.executable, "benchmarks/gpu_table.py", str(benchmarks), str(out)]
    done = subprocess.run(
        [*command, "--tests", str(tests), str(tests)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    result = json.loads(out.read_text())
    assert result["tests"] == {"tests": 10, "failures": 2, "errors": 0, "skipped": 4}
    assert [row["provider"] for row in result["rows"]] == ["ours"]
    assert done.stdout.splitlines()[-1] == "10 tests, 2 failures, 0 errors, 4 skipped"


def test_without_a_gpu_the_script_says_so(tmp_path):
    command = ["bash", "benchmarks/gpu_check.sh", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "gpu_check: expected a CUDA device, got none (torch " in done.stderr

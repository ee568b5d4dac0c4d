"""The Triton kernels as compiled for GPUs: no spills, full-width loads, one exp per element.

Compilation needs no GPU, but kernels that were not imported under TRITON_INTERPRET=1: a process of
its own. The core is one specialisation of each kernel and loop for sm_90; the rest is slow.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _reports(require: Callable[[str], None], tmp_path: Path, *options: str) -> list[dict]:
    require("triton_compiler")
    file = tmp_path / "aot.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "benchmarks/triton_aot.py", "--json", str(file), *options]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return json.loads(file.read_text())


def _assert_lean(reports: list[dict]) -> None:
    kernels = {report["kernel"] for report in reports}
    assert kernels >= {
        "_token_logprobs_fwd_kernel",
        "_token_logprobs_merge_kernel",
        "_token_logprobs_bwd_kernel",
        "_xrpo_advantages_kernel",
        "_batch_moments_kernel",
        "_sequence_logprobs_kernel",
    }
    vectorised = [report for report in reports if report["in_vectors"]]
    assert {report["kernel"] for report in vectorised} == {
        "_token_logprobs_fwd_kernel",
        "_token_logprobs_bwd_kernel",
    }
    for report in reports:
        assert report["spilled_bytes"] == 0, report
        if report["floor_bytes"] is not None:
            assert report["bytes_per_element"] == report["floor_bytes"], report
    for report in vectorised:
        assert report["load_bytes"] >= 16, report
        assert report["store_bytes"] is None or report["store_bytes"] >= 16, report
    for report in reports:
        if report["kernel"] == "_token_logprobs_fwd_kernel":
            # One per element, and one per thread and tile of 32 elements to rescale its sum.
            assert report["exps_per_element"] == 1 + 1 / 32, report
        elif report["kernel"] == "_token_logprobs_bwd_kernel":
            assert report["exps_per_element"] == 1, report


def test_core_specialisations_are_lean_on_sm_90(tmp_path, require):
    _assert_lean(_reports(require, tmp_path, "--core"))


@pytest.mark.slow
def test_every_specialisation_is_lean_on_every_target(tmp_path, require):
    reports = _reports(require, tmp_path)
    assert {report["target"] for report in reports} == {80, 90, 100}
    _assert_lean(reports)

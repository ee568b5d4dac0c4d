"""What stops a run, and what is told after the first step."""

import pytest
import torch

from xrpo_fast.doctor import MismatchError, check_agreement, first_step_findings

HEALTHY = {
    "groups/zero_variance_frac": 0.3,
    "completions/truncated_frac": 0.05,
    "completions/duplicate_frac": 0.1,
    "reward/errors": 0,
    "reward/std": 0.4,
    "reward/mean": 0.3,
}


def test_a_healthy_step_has_no_findings():
    assert first_step_findings(HEALTHY, 1024) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"groups/zero_variance_frac": 0.97}, "97% of the groups have equal rewards"),
        ({"completions/truncated_frac": 0.6}, "60% of the responses were cut at 1024 tokens"),
        (
            {"completions/duplicate_frac": 0.8, "groups/zero_variance_frac": 0.6},
            "80% of the responses equal another one of their group",
        ),
        ({"reward/errors": 3}, "3 verifications failed to run"),
        ({"reward/std": 0.0}, "the reward is constant (0.3)"),
    ],
    ids=["dead-groups", "truncated", "duplicates", "errors", "constant"],
)
def test_each_oddity_is_told_once_with_its_cause(changes, expected):
    findings = first_step_findings(HEALTHY | changes, 1024)
    assert len(findings) == 1
    assert expected in findings[0]
    assert ":" in findings[0], "the likely cause follows"


def test_duplicates_of_an_easy_task_are_no_oddity():
    assert first_step_findings(HEALTHY | {"completions/duplicate_frac": 0.8}, 1024) == []


@pytest.mark.parametrize(
    ("dtype", "gap", "is_stopped"),
    [
        (torch.float32, 1e-6, False),
        (torch.float32, 0.06, True),
        (torch.bfloat16, 0.01, False),
        (torch.bfloat16, 0.06, True),
        (torch.float32, float("nan"), True),
    ],
)
def test_disagreement_beyond_rounding_stops_the_run(dtype, gap, is_stopped):
    metrics = {"mismatch/logprob_abs_mean": gap}
    if not is_stopped:
        check_agreement(metrics, [dtype], 3)
        return
    with pytest.raises(
        MismatchError, match=r"step 3: expected sampler and trainer .*got (0\.06|nan)"
    ):
        check_agreement(metrics, [dtype], 3)


def test_a_step_that_measured_nothing_is_no_disagreement():
    check_agreement({}, [torch.float32], 1)

"""Bad input: the message names the argument, what was expected and what came."""

import numpy as np
import pytest
import torch

from xrpo_fast.ops import (
    group_advantages,
    linear_token_logprobs,
    sequence_logprobs,
    token_logprobs,
    xrpo_advantages,
)

LOGITS, LABELS = torch.zeros(3, 7), torch.zeros(3, dtype=torch.int64)
HIDDEN, WEIGHT = torch.zeros(3, 4), torch.zeros(7, 4)
REWARDS, SCORES, GROUPS = torch.zeros(4), torch.zeros(4), torch.tensor([0, 4])
TOKENS, SEQLENS = torch.zeros(6), torch.tensor([0, 1, 2, 3, 6])


@pytest.fixture(params=["torch", "cpp"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": LOGITS.int()}, TypeError, "logits: expected float32, bfloat16, .* got int32"),
        ({"logits": LOGITS[0]}, ValueError, r"logits: expected shape \(T, V\) .* got \(7,\)"),
        ({"logits": LOGITS[:, :0]}, ValueError, "logits: expected at least one column"),
        (
            {"logits": torch.zeros(7, 3).t()},
            ValueError,
            r"logits: expected stride\(-1\) == 1, got 3",
        ),
        ({"labels": LABELS.float()}, TypeError, "labels: expected int32, int64, got float32"),
        ({"labels": LABELS[:2]}, ValueError, r"labels: expected shape .* = \(3,\), got \(2,\)"),
        (
            {"labels": LABELS.to("meta")},
            ValueError,
            "labels: expected the device of logits, cpu, got meta",
        ),
        ({"mask": LABELS}, TypeError, "mask: expected bool, got int64"),
        ({"mask": LABELS[:, None].bool()}, ValueError, r"mask: expected shape .* got \(3, 1\)"),
        ({"temperature": 0.0}, ValueError, r"temperature: expected a finite number > 0, got 0\.0"),
        ({"temperature": -1}, ValueError, "temperature: expected a finite number > 0, got -1"),
        ({"temperature": float("nan")}, ValueError, "temperature: expected a finite .* got nan"),
        ({"temperature": float("inf")}, ValueError, "temperature: expected a finite .* got inf"),
        (
            {"temperature": torch.ones(3).double()},
            TypeError,
            "temperature: expected float32, got float64",
        ),
        (
            {"temperature": torch.ones(2)},
            ValueError,
            r"temperature: expected shape \(\) or .* got \(2,\)",
        ),
        (
            {"temperature": torch.tensor([1.0, 0.0, 1.0])},
            ValueError,
            "temperature: expected finite numbers > 0, got 0",
        ),
        (
            {"temperature": torch.tensor(float("inf"))},
            ValueError,
            "temperature: expected finite .* got inf",
        ),
        ({"vocab_size": 8}, ValueError, r"vocab_size: expected 1\.\.7 .* got 8"),
        ({"vocab_size": 0}, ValueError, r"vocab_size: expected 1\.\.7 .* got 0"),
        ({"backend": "cuda"}, ValueError, 'backend: expected one of auto, triton, .* got "cuda"'),
    ],
)
def test_token_logprobs(changes, error, message, backend):
    with pytest.raises(error, match=message):
        token_logprobs(**{"logits": LOGITS, "labels": LABELS, "backend": backend, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden": HIDDEN.int()}, TypeError, "hidden: expected float32"),
        ({"hidden": HIDDEN[0]}, ValueError, r"hidden: expected shape \(\.\.\., D\), got \(4,\)"),
        ({"weight": WEIGHT.double()}, TypeError, "weight: expected float32, got float64"),
        (
            {"weight": WEIGHT.t()},
            ValueError,
            r"weight: expected shape \(V, D\) with D = 4, got \(4, 7\)",
        ),
        ({"bias": torch.zeros(6)}, ValueError, r"bias: expected shape \(V,\) = \(7,\), got \(6,\)"),
        ({"active_rows": LABELS.int()}, TypeError, "active_rows: expected int64, got int32"),
        (
            {"active_rows": LABELS[None]},
            ValueError,
            r"active_rows: expected shape \(n,\), got \(1, 3\)",
        ),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes: expected > 0, got 0"),
        ({"vocab_size": 9}, ValueError, r"vocab_size: expected 1\.\.7"),
        (
            {"labels": LABELS[:1]},
            ValueError,
            r"labels: expected shape hidden.shape\[:-1\] = \(3,\)",
        ),
    ],
)
def test_linear_token_logprobs(changes, error, message, backend):
    call = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, "backend": backend, **changes}
    with pytest.raises(error, match=message):
        linear_token_logprobs(**call)


CU_GROUPS_ERRORS = [
    (torch.tensor([1, 4]), ValueError, "cu_groups: expected to start at 0, got 1"),
    (torch.tensor([0, 3]), ValueError, r"cu_groups: expected to end at 4 \(rows\), got 3"),
    (torch.tensor([0, 5]), ValueError, r"cu_groups: expected to end at 4 \(rows\), got 5"),
    (
        torch.tensor([0, 3, 2, 4]),
        ValueError,
        "cu_groups: expected values that do not decrease, got 2 after 3 at index 2",
    ),
    (torch.tensor([0.0, 4.0]), TypeError, "cu_groups: expected int32, int64, got float32"),
    (torch.tensor([[0, 4]]), ValueError, r"cu_groups: expected shape \(n \+ 1,\), got \(1, 2\)"),
    (
        torch.zeros(0, dtype=torch.int64),
        ValueError,
        r"cu_groups: expected shape \(n \+ 1,\), got \(0,\)",
    ),
]


@pytest.mark.parametrize(("cu_groups", "error", "message"), CU_GROUPS_ERRORS)
def test_cu_groups(cu_groups, error, message, backend):
    with pytest.raises(error, match=message):
        group_advantages(REWARDS, cu_groups=cu_groups, backend=backend)
    with pytest.raises(error, match=message):
        xrpo_advantages(REWARDS, scores=SCORES, cu_groups=cu_groups, backend=backend)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rewards": REWARDS[None]}, ValueError, r"rewards: expected shape \(S,\), got \(1, 4\)"),
        ({"rewards": REWARDS.to(torch.complex64)}, TypeError, "rewards: expected a real dtype"),
        ({"cu_groups": None}, ValueError, "exactly one of cu_groups and group_ids, got neither"),
        ({"group_ids": LABELS}, ValueError, "exactly one of cu_groups and group_ids, got both"),
        (
            {"cu_groups": None, "group_ids": LABELS},
            ValueError,
            r"group_ids: expected shape \(S,\) = \(4,\), got \(3,\)",
        ),
        (
            {"cu_groups": None, "group_ids": REWARDS},
            TypeError,
            "group_ids: expected int32, int64, got float32",
        ),
        (
            {"scores": None},
            ValueError,
            "scores: expected scores, or token_logprobs .* got none; pass novelty_weight=0",
        ),
        (
            {"token_logprobs": TOKENS},
            ValueError,
            "scores: expected None beside token_logprobs, got both",
        ),
        ({"cu_seqlens": SEQLENS}, ValueError, "cu_seqlens: expected None without token_logprobs"),
        (
            {"scores": None, "token_logprobs": TOKENS},
            ValueError,
            "cu_seqlens: expected it .* got neither",
        ),
        (
            {"scores": None, "token_logprobs": TOKENS, "cu_seqlens": SEQLENS[:3]},
            ValueError,
            r"cu_seqlens: expected shape \(S \+ 1,\) = \(5,\)",
        ),
        (
            {"scores": None, "token_logprobs": TOKENS, "cu_seqlens": SEQLENS.clamp(max=5)},
            ValueError,
            r"cu_seqlens: expected to end at 6 \(tokens\), got 5",
        ),
        (
            {
                "scores": None,
                "token_logprobs": torch.zeros(4, 2),
                "mask": torch.ones(4, 3, dtype=torch.bool),
            },
            ValueError,
            r"mask: expected shape \(S, L\) = \(4, 2\), got \(4, 3\)",
        ),
        ({"scores": SCORES[:3]}, ValueError, r"scores: expected shape \(S,\) = \(4,\), got \(3,\)"),
        ({"correct": REWARDS}, TypeError, "correct: expected bool, got float32"),
        (
            {"exclude_from_novelty": REWARDS.bool()[:1]},
            ValueError,
            r"exclude_from_novelty: expected shape .* got \(1,\)",
        ),
        (
            {"novelty_weight": -1.0},
            ValueError,
            r"novelty_weight: expected a finite number >= 0, got -1\.0",
        ),
        (
            {"novelty_clip": float("nan")},
            ValueError,
            "novelty_clip: expected a finite number >= 0, got nan",
        ),
        ({"eps": -1e-6}, ValueError, "eps: expected a finite number >= 0"),
        (
            {"scale": "batches"},
            ValueError,
            'scale: expected "group", "batch", "none", got "batches"',
        ),
        ({"ddof": 2}, ValueError, "ddof: expected 0 or 1, got 2"),
    ],
)
def test_xrpo_advantages(changes, error, message, backend):
    call = {
        "rewards": REWARDS,
        "scores": SCORES,
        "cu_groups": GROUPS,
        "backend": backend,
        **changes,
    }
    with pytest.raises(error, match=message):
        xrpo_advantages(**call)


def test_no_scores_are_needed_without_novelty(backend):
    result = xrpo_advantages(
        torch.tensor([1.0, 0.0, 0.0, 0.0]), cu_groups=GROUPS, novelty_weight=0, backend=backend
    )
    assert torch.equal(result.advantages, result.base)
    assert torch.equal(result.eta, torch.ones(4))


@pytest.mark.parametrize(
    ("tokens", "cu_seqlens", "normalize", "message"),
    [
        (TOKENS[None], SEQLENS, "mean", r"token_logprobs: expected shape \(T,\), got \(1, 6\)"),
        (TOKENS, SEQLENS + 1, "mean", "cu_seqlens: expected to start at 0, got 1"),
        (TOKENS, SEQLENS, "max", 'normalize: expected "mean", "sum", got "max"'),
    ],
)
def test_sequence_logprobs(tokens, cu_seqlens, normalize, message, backend):
    with pytest.raises(ValueError, match=message):
        sequence_logprobs(tokens, cu_seqlens, normalize=normalize, backend=backend)


def test_backends_that_cannot_run_say_why(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError, match='backend: expected one that runs on cpu, got "triton"; move'
    ):
        token_logprobs(LOGITS, LABELS, backend="triton")
    meta = torch.zeros(3, 7, device="meta")
    with pytest.raises(
        ValueError, match='logits: expected a cpu or cuda tensor, got meta; pass backend="torch"'
    ):
        token_logprobs(meta, LABELS.to("meta"))
    with pytest.raises(ValueError, match='backend: expected one that runs on meta, got "cpp"'):
        token_logprobs(meta, LABELS.to("meta"), backend="cpp")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TypeError, match=r"logits: expected bfloat16, .* got float64"):
        token_logprobs(LOGITS.double(), LABELS, backend="triton")


@pytest.mark.parametrize("value", [[0.0, 1.0], np.zeros(2, np.float32)], ids=["list", "numpy"])
def test_what_is_not_a_tensor_is_named(value) -> None:
    kind = type(value).__name__
    for call, argument in (
        (lambda: token_logprobs(value, LABELS), "logits"),
        (lambda: token_logprobs(LOGITS, value), "labels"),
        (lambda: group_advantages(value, cu_groups=GROUPS), "rewards"),
        (lambda: xrpo_advantages(REWARDS, scores=value, cu_groups=GROUPS), "scores"),
        (lambda: xrpo_advantages(REWARDS, scores=SCORES, cu_groups=value), "cu_groups"),
        (lambda: sequence_logprobs(value, SEQLENS), "token_logprobs"),
        (lambda: linear_token_logprobs(value, WEIGHT, LABELS), "hidden"),
    ):
        with pytest.raises(TypeError, match=rf"{argument}: expected a torch.Tensor, got .*{kind}"):
            call()

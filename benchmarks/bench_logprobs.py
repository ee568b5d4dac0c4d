"""CPU: log-probs of given tokens against what torch and TRL offer (GPU: bench_gpu.py).

    pytest benchmarks/bench_logprobs.py --benchmark-only

Workloads: forward, and forward + backward, of N x V logits; from hidden states through an LM head.
Bytes: the logits once for the forward, three times with the backward (read, read, write). Values
are checked against float64 before they are timed; `error` is the largest in nats.
"""

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xrpo_fast.ops import linear_token_logprobs, token_logprobs

IS_QUICK = os.environ.get("XRPO_BENCH_QUICK") == "1"
NUM_ROWS, COLUMNS = (16, 5000) if IS_QUICK else (512, 151_936)
LINEAR_ROWS, WIDTH, LINEAR_COLUMNS = (16, 32, 5000) if IS_QUICK else (256, 512, 16_384)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rounding of a bfloat16 result, up to 0.13 nats, is the rival's own choice: shown, not forbidden.
MAX_ERROR = 0.2

Provider = Callable[[Tensor, Tensor], Tensor]


def eager(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)


def logsumexp_and_gather(logits: Tensor, labels: Tensor) -> Tensor:
    x = logits.float()
    return x.gather(-1, labels[:, None]).squeeze(-1) - x.logsumexp(-1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(logits, labels, reduction="none")


def ours(logits: Tensor, labels: Tensor) -> Tensor:
    return token_logprobs(logits, labels).logprobs


def ours_and_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return token_logprobs(logits, labels, return_entropy=True).logprobs


def provider_of(name: str, require: Callable[[str], None]) -> Provider:
    if name == "trl selective_log_softmax":
        require("trl")
        from trl.trainer.utils import selective_log_softmax

        return selective_log_softmax
    if name == "torch.compile":
        return torch.compile(logsumexp_and_gather)
    plain = {
        "ours": ours,
        "ours + entropy": ours_and_entropy,
        "eager": eager,
        "cross_entropy": cross_entropy,
    }
    return plain[name]


PROVIDERS = [
    "ours",
    "ours + entropy",
    "eager",
    "torch.compile",
    "cross_entropy",
    "trl selective_log_softmax",
]


@pytest.fixture(params=DTYPES, scope="module")
def batch(request: pytest.FixtureRequest) -> tuple[str, Tensor, Tensor, Tensor]:
    """dtype name, logits, labels, exact log-probs."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(NUM_ROWS, COLUMNS, generator=generator)
    logits = logits.to(DTYPES[request.param])
    labels = torch.randint(0, COLUMNS, (NUM_ROWS,), generator=generator)
    exact = torch.stack(
        [row.double().log_softmax(-1)[label] for row, label in zip(logits, labels, strict=True)]
    )
    return request.param, logits, labels, exact


def error_of(values: Tensor, exact: Tensor, provider: str) -> float:
    error = (values.detach().double() - exact).abs().max().item()
    assert error <= (5e-5 if provider.startswith("ours") else MAX_ERROR), (
        f"{provider}: {error} nats"
    )
    return error


@pytest.mark.parametrize("provider", PROVIDERS)
def test_forward(batch, provider, measure, require):
    dtype, logits, labels, exact = batch
    run = provider_of(provider, require)
    measure(
        lambda: run(logits, labels),
        f"forward {dtype} {NUM_ROWS}x{COLUMNS}",
        provider,
        logits.nbytes,
        error_of(run(logits, labels), exact, provider),
    )


def test_forward_floor(batch, measure):
    dtype, logits, _, _ = batch
    workload = f"forward {dtype} {NUM_ROWS}x{COLUMNS}"
    measure(lambda: logits.sum(-1), workload, "floor: x.sum(-1)", logits.nbytes)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_forward_backward(batch, provider, measure, require):
    dtype, logits, labels, exact = batch
    run = provider_of(provider, require)
    leaf = logits.detach().requires_grad_()

    def step() -> None:
        leaf.grad = None
        run(leaf, labels).sum().backward()

    error = error_of(run(logits, labels), exact, provider)
    step()
    # The gradient of a sum of log-probs sums to 0 over the vocabulary.
    assert leaf.grad.float().sum(-1).abs().max() < (1e-3 if dtype == "fp32" else 0.05)
    workload = f"forward + backward {dtype} {NUM_ROWS}x{COLUMNS}"
    measure(step, workload, provider, 3 * logits.nbytes, error, rounds=5)


def linear_eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return eager(F.linear(hidden, weight), labels)


def linear_ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_token_logprobs(hidden, weight, labels, chunk_bytes=64 << 20).logprobs


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch has no F.linear_cross_entropy")
    return -F.linear_cross_entropy(hidden, weight, labels, reduction="none")


@pytest.mark.parametrize("provider", [linear_ours, linear_eager, linear_cross_entropy])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_forward_backward(dtype, provider, measure):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(LINEAR_ROWS, WIDTH, generator=generator).to(DTYPES[dtype])
    weight = torch.randn(LINEAR_COLUMNS, WIDTH, generator=generator).mul_(2 * WIDTH**-0.5)
    weight = weight.to(DTYPES[dtype])
    labels = torch.randint(0, LINEAR_COLUMNS, (LINEAR_ROWS,), generator=generator)
    logits = hidden.double() @ weight.double().t()
    exact = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    name = "ours" if provider is linear_ours else provider.__name__.removeprefix("linear_")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def step() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        values = provider(*leaves, labels)
        values.sum().backward()
        return values

    measure(
        step,
        f"linear forward + backward {dtype} {LINEAR_ROWS}x{WIDTH}x{LINEAR_COLUMNS}",
        name,
        3 * LINEAR_ROWS * LINEAR_COLUMNS * 4,
        error_of(step(), exact, name),
        rounds=3,
    )

"""linear_token_logprobs against float64 of the same inputs. T rows, V vocabulary, D width."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xrpo_fast.kernels import reference
from xrpo_fast.ops import last_backend, linear_token_logprobs

# ops.md: log-probs absolute and relative; gradients by direction and by relative L2 norm.
LOGPROB_ATOL, LOGPROB_RTOL = 1e-4, 1e-5
MIN_COSINE, MAX_RELATIVE_L2 = 0.9999, 4e-3


def make(num_rows: int, width: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight, bias = normal(num_rows, width), normal(columns, width), normal(columns)
    labels = torch.randint(0, columns, (num_rows,), generator=generator)
    weight *= 2 * width**-0.5
    return [
        hidden.to(device, dtype),
        weight.to(device, dtype),
        bias.to(device, dtype),
        labels.to(device),
    ]


def truth(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, keep: Tensor, **options
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """logprobs, entropy and gradients of sum(logprobs - 0.3 entropy) over the kept rows."""
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = F.linear(*inputs)[:, : options.get("vocab_size")]
    logp = (logits / options.get("temperature", 1.0)).log_softmax(-1)
    logprobs = torch.where(keep, logp.gather(1, labels[:, None]).squeeze(1), 0.0)
    entropy = torch.where(keep, -(logp.exp() * logp).sum(-1), 0.0)
    gradients = torch.autograd.grad((logprobs - 0.3 * entropy).sum(), inputs)
    return logprobs.detach(), entropy.detach(), list(gradients)


def check(inputs: list[Tensor], backend: str, keep: Tensor | None = None, **options) -> None:
    hidden, weight, bias, labels = inputs
    leaves = [x.detach().requires_grad_() for x in (hidden, weight, bias)]
    result = linear_token_logprobs(
        *leaves[:2], labels, bias=leaves[2], return_entropy=True, backend=backend, **options
    )
    assert last_backend() == backend
    gradients = torch.autograd.grad((result.logprobs - 0.3 * result.entropy).sum(), leaves)
    keep = torch.ones_like(labels, dtype=torch.bool) if keep is None else keep
    math = {k: v for k, v in options.items() if k in ("temperature", "vocab_size")}
    logprobs, entropy, exact = truth(hidden, weight, bias, labels, keep, **math)
    for name, ours, true in (
        ("logprobs", result.logprobs, logprobs),
        ("entropy", result.entropy, entropy),
    ):
        torch.testing.assert_close(
            ours.double(),
            true,
            atol=LOGPROB_ATOL,
            rtol=LOGPROB_RTOL,
            msg=lambda t, n=name: f"{n}: {t}",
        )
    for name, ours, true in zip(("dhidden", "dweight", "dbias"), gradients, exact, strict=True):
        assert ours.dtype == hidden.dtype
        ours = ours.double()
        cosine = F.cosine_similarity(ours.flatten(), true.flatten(), dim=0).item()
        relative = ((ours - true).norm() / true.norm()).item()
        assert cosine >= MIN_COSINE, f"{name}: cosine {cosine}"
        assert relative <= MAX_RELATIVE_L2, f"{name}: relative L2 {relative}"


# One chunk, several with a ragged last one, one row each.
@pytest.mark.parametrize("rows_per_chunk", [64, 5, 1], ids=lambda n: f"chunk{n}")
def test_matches_float64(rows_per_chunk, dtype, backend, device):
    inputs = make(23, 32, 307, dtype, device)
    check(inputs, backend, chunk_bytes=rows_per_chunk * 307 * 4, temperature=0.7)


@pytest.mark.large
def test_matches_float64_at_a_wide_model(dtype, backend, device):
    # The weights take more than one block of the CPU's upcast.
    check(make(9, 1024, 20_011, dtype, device), backend, chunk_bytes=4 * 20_011 * 4)


def test_padded_vocabulary(dtype, backend, device):
    inputs = make(7, 16, 100, dtype, device)
    inputs[1][90:] = 1e4
    inputs[3] %= 90
    check(inputs, backend, vocab_size=90)


def test_no_bias_and_frozen_inputs(backend, device):
    hidden, weight, _, labels = make(6, 8, 50, torch.float32, device)
    keep = torch.ones_like(labels, dtype=torch.bool)
    logprobs, _, _ = truth(hidden, weight, None, labels, keep)
    result = linear_token_logprobs(hidden, weight, labels, backend=backend)
    torch.testing.assert_close(result.logprobs.double(), logprobs, atol=1e-5, rtol=1e-5)
    assert result.entropy is None
    weight.requires_grad_()
    linear_token_logprobs(hidden, weight, labels, backend=backend).logprobs.sum().backward()
    assert hidden.grad is None
    assert bool(weight.grad.abs().sum() > 0)


@pytest.mark.parametrize("way", ["mask", "active_rows", "both"])
def test_rows_left_out(way, dtype, backend, device):
    inputs = make(12, 16, 60, dtype, device)
    keep = torch.arange(12, device=device) % 3 != 1
    options = {}
    if way != "active_rows":
        options["mask"] = keep if way == "mask" else torch.arange(12, device=device) % 3 != 2
    if way != "mask":
        options["active_rows"] = torch.arange(12, device=device)[keep].flip(0)
    if way == "both":
        keep = keep & options["mask"]
    # What is left out may hold anything.
    poisoned = [inputs[0].clone(), *inputs[1:3], torch.where(keep, inputs[3], -100)]
    poisoned[0][~keep] = float("nan")
    leaves = [x.detach().requires_grad_() for x in poisoned[:3]]
    result = linear_token_logprobs(
        *leaves[:2], poisoned[3], bias=leaves[2], backend=backend, chunk_bytes=3 * 60 * 4, **options
    )
    gradients = torch.autograd.grad(result.logprobs.sum(), leaves)
    assert torch.equal(gradients[0][~keep], torch.zeros_like(gradients[0][~keep]))
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert torch.equal(result.logprobs[~keep], torch.zeros_like(result.logprobs[~keep]))
    check(inputs, backend, keep=keep, chunk_bytes=3 * 60 * 4, **options)


def test_temperature_per_token_and_batch_shape(backend, device):
    hidden, weight, bias, labels = make(12, 8, 40, torch.float32, device)
    temperature = torch.linspace(0.5, 2, 12, device=device)
    flat = linear_token_logprobs(
        hidden, weight, labels, bias=bias, temperature=temperature, backend=backend
    )
    exact, _, _ = truth(hidden, weight, bias, labels, labels >= 0, temperature=temperature[:, None])
    torch.testing.assert_close(flat.logprobs.double(), exact, atol=1e-5, rtol=1e-5)
    shaped = linear_token_logprobs(
        hidden.view(3, 4, 8),
        weight,
        labels.view(3, 4),
        bias=bias,
        temperature=temperature.view(3, 4),
        backend=backend,
    )
    assert torch.equal(shaped.logprobs, flat.logprobs.view(3, 4))


def test_no_rows(backend, device):
    hidden, weight, _, _ = make(4, 8, 40, torch.float32, device)
    hidden = hidden[:0].requires_grad_()
    labels = torch.zeros(0, dtype=torch.int64, device=device)
    result = linear_token_logprobs(hidden, weight.requires_grad_(), labels, backend=backend)
    result.logprobs.sum().backward()
    assert result.logprobs.shape == (0,)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_logits_never_exist_in_full(monkeypatch):
    rows_seen = []
    launch = reference.token_logprobs_fwd

    def spy(logits: Tensor, *rest):
        rows_seen.append(logits.shape[0])
        return launch(logits, *rest)

    monkeypatch.setattr("xrpo_fast.ops.linear_logprobs_op.launcher", lambda *_: spy)
    hidden, weight, _, labels = make(20, 8, 50, torch.float32, "cpu")
    mask = torch.arange(20) < 13
    linear_token_logprobs(
        hidden, weight, labels, mask=mask, chunk_bytes=4 * 50 * 4 + 3, backend="torch"
    )
    assert rows_seen == [4, 4, 4, 1]

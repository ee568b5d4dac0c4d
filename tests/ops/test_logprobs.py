"""token_logprobs against float64 on the same stored inputs. T rows, V vocabulary."""

import pytest
import torch
from torch import Tensor

from xrpo_fast.kernels import reference
from xrpo_fast.ops import last_backend, token_logprobs

# ops.md: absolute, and relative to the size that the quantity is rounded at.
LOGPROB_ATOL, LOGPROB_RTOL = 2e-6, 1e-6
ENTROPY_ATOL, ENTROPY_RTOL = 1e-5, 1e-5
GRAD_ATOL, GRAD_RTOL_FP32 = 1e-7, 2e-5

# Shapes: one row and one column, primes, one tile of 4096 -1, 0 and +1 columns, few rows (a row is
# split over threads or programs) and many. Model vocabularies are in VOCABULARIES.
SHAPES = [(1, 1), (3, 2), (1, 100), (13, 257), (2, 4095), (5, 4096), (2, 4097)]
VOCABULARIES = [32000, 49152, 50257, 128256, 129920, 151936, 152064, 262144]


def shape_id(shape: tuple[int, int]) -> str:
    return f"T{shape[0]}-V{shape[1]}"


def make(
    num_rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Peaked, flat and shifted rows, and labels that are likely as well as unlikely."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.1, 6, num_rows)[:, None]
    shift = torch.linspace(-50, 50, num_rows)[:, None]
    logits = torch.randn(num_rows, columns, generator=generator) * scale + shift
    labels = torch.randint(0, columns, (num_rows,), generator=generator)
    labels[::2] = logits.argmax(-1)[::2]
    return logits.to(dtype).to(device), labels.to(device)


def truth(
    logits: Tensor, labels: Tensor, g: Tensor, ge: Tensor | None, **options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, entropy, lse, dlogits in float64, by autograd through plain torch."""
    temperature = options.get("temperature", 1.0)
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = temperature[..., None]
    columns = options.get("vocab_size") or logits.shape[-1]
    x = logits.detach().double().requires_grad_()
    z = x[..., :columns] / temperature
    logp = z.log_softmax(-1)
    logprobs = logp.gather(-1, labels.long()[..., None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    loss = (logprobs * g).sum() + (0 if ge is None else (entropy * ge).sum())
    (dlogits,) = torch.autograd.grad(loss, x)
    return logprobs.detach(), entropy.detach(), z.logsumexp(-1).detach(), dlogits


def assert_within(name: str, ours: Tensor, exact: Tensor, allowed: Tensor) -> None:
    """|ours - exact| <= allowed elementwise; the message names the worst element."""
    error = (ours.double() - exact).abs()
    excess = torch.where(error <= allowed, 0.0, error / allowed).nan_to_num(float("inf"))
    if bool((excess > 0).any()):
        worst = int(excess.flatten().argmax())
        pick = [float(t.flatten()[worst]) for t in (ours.double(), exact, error, allowed)]
        pytest.fail(f"{name}[{worst}]: got {pick[0]}, exact {pick[1]}, off {pick[2]} > {pick[3]}")


def one_ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of dtype's numbers at `exact`, subnormals included."""
    info = torch.finfo(dtype)
    exponent = exact.abs().clamp(min=info.tiny).log2().floor()
    return torch.exp2(exponent) * info.eps


def check(logits: Tensor, labels: Tensor, backend: str, *, with_entropy: bool, **options) -> None:
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(labels.shape, generator=generator).to(logits.device)
    ge = torch.randn(labels.shape, generator=generator).to(logits.device) if with_entropy else None
    x = logits.detach().requires_grad_()
    result = token_logprobs(x, labels, return_entropy=with_entropy, backend=backend, **options)
    assert last_backend() == backend
    loss = (result.logprobs * g).sum()
    if with_entropy:
        loss = loss + (result.entropy * ge).sum()
    (dlogits,) = torch.autograd.grad(loss, x)
    assert dlogits.dtype == logits.dtype
    assert dlogits.is_contiguous()

    logprobs, entropy, lse, exact = truth(logits, labels, g, ge, **options)
    allowed = LOGPROB_ATOL + LOGPROB_RTOL * ((logprobs + lse).abs() + lse.abs())
    assert_within("logprobs", result.logprobs, logprobs, allowed)
    if with_entropy:
        allowed = ENTROPY_ATOL + ENTROPY_RTOL * entropy.abs()
        assert_within("entropy", result.entropy, entropy, allowed)
    temperature = options.get("temperature", 1.0)
    size = g.abs() if ge is None else torch.maximum(g.abs(), ge.abs())
    floor = GRAD_ATOL * (size / temperature)[..., None].double()
    rounding = (
        GRAD_RTOL_FP32 * exact.abs()
        if logits.dtype == torch.float32
        else one_ulp(exact, logits.dtype)
    )
    assert_within("dlogits", dlogits, exact, floor + rounding)


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprob", "entropy"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_matches_float64(shape, with_entropy, dtype, backend, device):
    check(*make(*shape, dtype, device), backend, with_entropy=with_entropy)


@pytest.mark.large
def test_matches_float64_with_many_rows(dtype, backend, device):
    check(*make(307, 1009, dtype, device), backend, with_entropy=True)


@pytest.mark.large
@pytest.mark.parametrize("columns", VOCABULARIES)
def test_matches_float64_at_model_vocabularies(columns, dtype, backend, device):
    check(*make(3, columns, dtype, device), backend, with_entropy=True)


def test_vocabulary_of_no_power_of_two_counts_no_padding(backend, device):
    # All logits 0: -log V exactly, whatever tile the kernel reads.
    for columns in (100, 129920):
        logits = torch.zeros(1, columns, device=device)
        labels = torch.zeros(1, dtype=torch.int64, device=device)
        result = token_logprobs(logits, labels, return_entropy=True, backend=backend)
        exact = torch.tensor(float(columns), dtype=torch.float64).log()
        torch.testing.assert_close(-result.logprobs.cpu().double()[0], exact, atol=2e-6, rtol=0)
        torch.testing.assert_close(result.entropy.cpu().double()[0], exact, atol=2e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.1, 0.6, 1.7])
def test_temperature_divides_once_everywhere(temperature, dtype, backend, device):
    logits, labels = make(7, 300, dtype, device)
    check(logits, labels, backend, with_entropy=True, temperature=temperature)
    scalar = torch.tensor(temperature, device=device)
    check(logits, labels, backend, with_entropy=True, temperature=scalar)


def test_temperature_per_token(dtype, backend, device):
    logits, labels = make(7, 300, dtype, device)
    temperature = torch.linspace(0.3, 2.0, 7, device=device)
    check(logits, labels, backend, with_entropy=True, temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-35, 1e35])
def test_temperature_beyond_float_range(temperature, device):
    for backend in ("torch", "cpp"):
        logits = torch.tensor([[0.0, -float("inf"), 0.0]])
        result = token_logprobs(
            logits, torch.tensor([0]), temperature=temperature, return_entropy=True, backend=backend
        )
        torch.testing.assert_close(result.logprobs, torch.tensor([0.5]).log(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("labels_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_label_dtypes(labels_dtype, backend, device):
    logits, labels = make(9, 211, torch.float32, device)
    check(logits, labels.to(labels_dtype), backend, with_entropy=False)


def test_padded_vocabulary_is_ignored(dtype, backend, device):
    logits, labels = make(6, 300, dtype, device)
    labels %= 271
    logits[:, 271:] = float("nan")
    check(logits, labels, backend, with_entropy=True, vocab_size=271)


def views(logits: Tensor) -> dict[str, Tensor]:
    """The same (4, 6, V) values behind other strides."""
    batch, length, columns = logits.shape
    padded = logits.new_full((batch, length, columns + 19), float("nan"))
    padded[..., :columns] = logits
    longer = logits.new_full((batch, length + 1, columns), float("nan"))
    longer[:, :length] = logits
    return {
        "padded-rows": padded[..., :columns],
        "shifted": longer[:, :length],
        "transposed": logits.transpose(0, 1).contiguous().transpose(0, 1),
        "every-other-row": logits.repeat_interleave(2, dim=1)[:, ::2],
        "unaligned": torch.cat([logits.flatten()[:3], logits.flatten()])[3:].view_as(logits),
    }


@pytest.mark.parametrize(
    "view", ["padded-rows", "shifted", "transposed", "every-other-row", "unaligned"]
)
def test_row_strides(view, dtype, backend, device):
    logits, labels = make(24, 131, dtype, device)
    temperature = torch.linspace(0.5, 2, 24, device=device).view(4, 6)
    strided = views(logits.view(4, 6, 131))[view]
    check(strided, labels.view(4, 6), backend, with_entropy=True, temperature=temperature)


def test_expanded_row(backend, device):
    logits, _ = make(1, 97, torch.float32, device)
    labels = torch.arange(5, device=device)
    wide = token_logprobs(logits.expand(5, 97), labels, backend=backend)
    alone = token_logprobs(logits.repeat(5, 1), labels, backend=backend)
    assert torch.equal(wide.logprobs, alone.logprobs)


def test_unscored_rows_are_never_read(dtype, backend, device):
    logits, labels = make(8, 129, dtype, device)
    mask = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0], dtype=torch.bool, device=device)
    poisoned, wild = logits.clone(), labels.clone()
    poisoned[~mask] = float("nan")
    wild[~mask] = -100
    x = poisoned.requires_grad_()
    result = token_logprobs(x, wild, mask=mask, return_entropy=True, backend=backend)
    # NaN arrives from upstream at unscored rows: it must be selected away, not multiplied.
    g = torch.where(mask, 1.0, float("nan"))
    (dx,) = torch.autograd.grad((result.logprobs, result.entropy), x, (g, g))
    assert torch.equal(result.logprobs[~mask], torch.zeros_like(result.logprobs[~mask]))
    assert torch.equal(result.entropy[~mask], torch.zeros_like(result.entropy[~mask]))
    assert torch.equal(dx[~mask], torch.zeros_like(dx[~mask]))
    y = logits[mask].detach().requires_grad_()
    alone = token_logprobs(y, labels[mask], return_entropy=True, backend=backend)
    (dy,) = torch.autograd.grad((alone.logprobs + alone.entropy).sum(), y)
    assert torch.equal(result.logprobs[mask], alone.logprobs)
    assert torch.equal(result.entropy[mask], alone.entropy)
    assert torch.equal(dx[mask], dy)


def test_row_without_upstream_gradient_is_skipped(backend, device):
    logits, labels = make(4, 65, torch.float32, device)
    logits[1] = float("nan")
    x = logits.requires_grad_()
    g = torch.tensor([1.0, 0.0, -2.0, 0.0], device=device)
    (dx,) = torch.autograd.grad(token_logprobs(x, labels, backend=backend).logprobs, x, g)
    assert torch.equal(dx[[1, 3]], torch.zeros_like(dx[[1, 3]]))
    assert bool(dx[[0, 2]].isfinite().all())


@pytest.mark.parametrize("bad", [-1, -100, 129, 2**31 - 1])
def test_label_out_of_range_gives_nan_and_no_gradient(bad, backend, device):
    logits, labels = make(3, 129, torch.float32, device)
    labels[1] = bad
    x = logits.requires_grad_()
    result = token_logprobs(x, labels, return_entropy=True, backend=backend)
    (dx,) = torch.autograd.grad((result.logprobs + result.entropy).sum(), x)
    assert result.logprobs.isnan().tolist() == [False, True, False]
    assert result.entropy.isnan().tolist() == [False, True, False]
    assert torch.equal(dx[1], torch.zeros_like(dx[1]))


def test_label_in_the_padding_is_out_of_range(backend, device):
    logits, _ = make(2, 40, torch.float32, device)
    labels = torch.tensor([29, 30], device=device)
    result = token_logprobs(logits, labels, vocab_size=30, backend=backend)
    assert result.logprobs.isnan().tolist() == [False, True]


def test_first_block_of_minus_infinity(backend, device):
    # flash-attn #1930: a leading block of -inf alone.
    for columns, place in ((100_000, 50_000), (4097, 4096), (9000, 0)):
        x = torch.full((1, columns), -float("inf"), device=device)
        x[0, place] = 10.0
        x.requires_grad_()
        labels = torch.tensor([place], device=device)
        result = token_logprobs(x, labels, return_entropy=True, backend=backend)
        assert result.logprobs.tolist() == [0.0]
        assert result.entropy.tolist() == [0.0]
        (dx,) = torch.autograd.grad((result.logprobs + result.entropy).sum(), x)
        assert torch.equal(dx, torch.zeros_like(dx))


def test_label_at_minus_infinity(dtype, backend, device):
    x = torch.tensor([[1.0, -float("inf"), 2.0]], dtype=dtype, device=device, requires_grad=True)
    result = token_logprobs(
        x, torch.tensor([1], device=device), return_entropy=True, backend=backend
    )
    assert result.logprobs.tolist() == [-float("inf")]
    (dx,) = torch.autograd.grad(result.logprobs.sum(), x)
    p = torch.tensor([1.0, 2.0], dtype=torch.float64).softmax(0)
    exact = torch.tensor([[-p[0], 1.0, -p[1]]], dtype=torch.float64)
    assert_within("dlogits", dx.cpu(), exact, 1e-7 + 2 * one_ulp(exact, dtype))


def test_entropy_of_a_certain_row_is_zero(dtype, backend, device):
    # TRL #7221: 0 * -inf.
    for row in ([0.0, -float("inf")], [65504.0, -65504.0]):
        x = torch.tensor([row], device=device).to(dtype).requires_grad_()
        result = token_logprobs(
            x, torch.tensor([0], device=device), return_entropy=True, backend=backend
        )
        assert result.entropy.tolist() == [0.0]
        (dx,) = torch.autograd.grad(result.entropy.sum(), x)
        assert torch.equal(dx, torch.zeros_like(dx))


@pytest.mark.parametrize("kind", ["all -inf", "+inf", "nan"])
def test_rows_that_have_no_distribution_are_nan(kind, backend, device):
    logits, labels = make(3, 70, torch.float32, device)
    if kind == "all -inf":
        logits[1] = -float("inf")
    else:
        logits[1, 33] = float(kind)
    x = logits.requires_grad_()
    result = token_logprobs(x, labels, return_entropy=True, backend=backend)
    (dx,) = torch.autograd.grad(result.logprobs.sum(), x)
    assert result.logprobs.isnan().tolist() == [False, True, False]
    assert result.entropy.isnan().tolist() == [False, True, False]
    assert bool(dx[1].isnan().all())
    assert bool(dx[[0, 2]].isfinite().all())


def test_confident_tokens_have_exact_gradients(backend, device):
    # With a rounded fp32 lse the gradient 1 - p of a confident token is lost.
    gaps = torch.tensor([5.0, 10.0, 14.0, 17.0, 20.0], device=device)
    logits = torch.zeros(5, 64, device=device)
    logits[:, 3] = gaps + 100
    logits[:, :3] += 100
    logits[:, 4:] += 100
    check(logits, torch.full((5,), 3, device=device), backend, with_entropy=True)


@pytest.mark.parametrize("columns", [1000, 4096, pytest.param(151936, marks=pytest.mark.large)])
def test_tail_of_small_probabilities_is_not_lost(columns, dtype, backend, device):
    # exp(-17.5) = 0.42 * 2^-24: in a float sum, each would vanish beside the 1 of the likely token.
    logits = torch.full((2, columns), -17.5, device=device)
    logits[:, columns // 2] = 0.0
    logits[1, 0] = -0.25
    labels = torch.full((2,), columns // 2, device=device)
    check(logits.to(dtype), labels, backend, with_entropy=True)


def test_rows_do_not_depend_on_their_neighbours(dtype, backend, device):
    # verl #6280: the same tokens in another batch. Bitwise, split rows included.
    logits, labels = make(16, 5003, dtype, device)
    ge = torch.linspace(-1, 1, 16, device=device)

    def run(rows: list[int]) -> tuple[Tensor, ...]:
        x = logits[rows].detach().requires_grad_()
        result = token_logprobs(x, labels[rows], return_entropy=True, backend=backend)
        loss = result.logprobs.sum() + (result.entropy * ge[rows]).sum()
        (dx,) = torch.autograd.grad(loss, x)
        return result.logprobs, result.entropy, dx

    if backend == "torch":
        pytest.skip("torch reduces by shape; only the kernels promise it")
    everything = run(list(range(16)))
    for rows in ([0], [15], [7, 3, 12]):
        for ours, same in zip(run(rows), everything, strict=True):
            assert torch.equal(ours, same[rows])


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5), (2, 0, 5)], ids=str)
def test_no_rows(shape, backend, device):
    x = torch.zeros(shape, device=device, requires_grad=True)
    labels = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    result = token_logprobs(x, labels, return_entropy=True, backend=backend)
    assert result.logprobs.shape == labels.shape
    assert result.entropy.shape == labels.shape
    (dx,) = torch.autograd.grad(result.logprobs.sum() + result.entropy.sum(), x)
    assert dx.shape == x.shape


def test_batch_shape(backend, device):
    logits, labels = make(12, 50, torch.float32, device)
    flat = token_logprobs(logits, labels, return_entropy=True, backend=backend)
    shaped = token_logprobs(
        logits.view(3, 4, 50), labels.view(3, 4), return_entropy=True, backend=backend
    )
    assert torch.equal(shaped.logprobs, flat.logprobs.view(3, 4))
    assert torch.equal(shaped.entropy, flat.entropy.view(3, 4))
    assert token_logprobs(logits, labels, backend=backend).entropy is None


def test_unused_outputs_have_no_gradient(backend, device):
    logits, labels = make(3, 20, torch.float32, device)
    x = logits.requires_grad_()
    result = token_logprobs(x, labels, return_entropy=True, backend=backend)
    (only_entropy,) = torch.autograd.grad(result.entropy.sum(), x, retain_graph=True)
    _, _, _, exact = truth(
        logits, labels, torch.zeros(3, device=device), torch.ones(3, device=device)
    )
    assert_within("dlogits", only_entropy, exact, 1e-7 + 2e-5 * exact.abs())
    (only_logprobs,) = torch.autograd.grad(result.logprobs.sum(), x)
    _, _, _, exact = truth(logits, labels, torch.ones(3, device=device), None)
    assert_within("dlogits", only_logprobs, exact, 1e-7 + 2e-5 * exact.abs())


def test_float64_reference_is_plain_torch():
    logits, labels = make(5, 30, torch.float64, "cpu")
    logprobs, entropy, _, _ = reference.token_logprobs_fwd(logits, labels, 0.7, None, 30, True)
    exact, exact_entropy, _, _ = truth(logits, labels, torch.ones(5), None, temperature=0.7)
    torch.testing.assert_close(logprobs, exact, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, exact_entropy, atol=1e-12, rtol=1e-12)

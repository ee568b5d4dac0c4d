"""The Triton kernels at the sizes and with the promises that only a GPU can show."""

import pytest
import torch

pytestmark = pytest.mark.gpu

VOCABULARIES = [32000, 49152, 50257, 128256, 129920, 151936, 152064, 262144]


@pytest.fixture(autouse=True)
def gpu(require):
    require("triton")
    require("gpu")


def _forward_and_backward(logits, labels, upstream, **options):
    from xrpo_fast.ops import token_logprobs

    leaf = logits.detach().requires_grad_()
    logprobs = token_logprobs(leaf, labels, backend="triton", **options).logprobs
    (gradient,) = torch.autograd.grad(logprobs, leaf, upstream)
    return logprobs.detach(), gradient


def _truth(logits, labels, upstream, temperature):
    """(log-probs, gradient) in float64, row by row to bound the memory."""
    x = logits.double() / temperature
    lse = x.logsumexp(-1)
    logprobs = x.gather(1, labels[:, None]).squeeze(1) - lse
    gradient = -(x - lse[:, None]).exp_()
    gradient.scatter_add_(1, labels[:, None], torch.ones_like(lse)[:, None])
    return logprobs, gradient * (upstream.double() / temperature)[:, None], lse


@pytest.mark.parametrize("num_rows", [3, 300], ids=["T3", "T300"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("vocab_size", VOCABULARIES, ids=[f"V{v}" for v in VOCABULARIES])
def test_values_and_gradients_at_real_vocabularies(vocab_size, dtype, num_rows):
    torch.manual_seed(0)
    logits = (4 * torch.randn(num_rows, vocab_size, device="cuda")).to(dtype)
    labels = torch.randint(vocab_size, (num_rows,), device="cuda")
    logits[0, labels[0]] = 30.0
    upstream = torch.randn(num_rows, device="cuda")
    logprobs, gradient = _forward_and_backward(logits, labels, upstream, temperature=0.7)
    want, want_gradient, lse = _truth(logits, labels, upstream, 0.7)
    label_logits = logits.double().gather(1, labels[:, None]).squeeze(1) / 0.7
    assert ((logprobs - want).abs() <= 2e-6 + 1e-6 * (label_logits.abs() + lse.abs())).all()
    relative = 2e-5 if dtype == torch.float32 else 2.0**-7
    limit = 1e-7 * upstream.abs()[:, None] / 0.7 + relative * want_gradient.abs()
    assert ((gradient.double() - want_gradient).abs() <= limit).all()


def test_a_row_keeps_its_bits_whatever_the_number_of_rows():
    from xrpo_fast.ops import token_logprobs

    torch.manual_seed(0)
    logits = torch.randn(600, 151936, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(151936, (600,), device="cuda")
    alone = token_logprobs(logits, labels, return_entropy=True)
    for num_rows in (1, 2, 131, 263, 264, 265, 599):
        part = token_logprobs(logits[-num_rows:], labels[-num_rows:], return_entropy=True)
        assert torch.equal(part.logprobs, alone.logprobs[-num_rows:])
        assert torch.equal(part.entropy, alone.entropy[-num_rows:])


def test_more_than_2_to_the_31_elements_and_65535_rows():
    from xrpo_fast.ops import token_logprobs

    num_rows, vocab_size = 70000, 32000
    needed = 2 * num_rows * vocab_size * 2
    if torch.cuda.mem_get_info()[0] < 1.2 * needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    logits = torch.zeros(num_rows, vocab_size, device="cuda", dtype=torch.bfloat16)
    labels = torch.arange(num_rows, device="cuda") % vocab_size
    rows = torch.tensor([0, 65535, 65536, 67108, 67109, num_rows - 1], device="cuda")
    logits[rows, labels[rows]] = 12.0
    upstream = torch.zeros(num_rows, device="cuda")
    upstream[rows] = 1.0
    leaf = logits.requires_grad_()
    logprobs = token_logprobs(leaf, labels).logprobs
    (gradient,) = torch.autograd.grad(logprobs, leaf, upstream)
    want = torch.tensor(12.0, dtype=torch.float64).sub(
        torch.logsumexp(
            torch.cat([torch.full((1,), 12.0), torch.zeros(vocab_size - 1)]).double(), 0
        )
    )
    assert (logprobs[rows].double().cpu() - want).abs().max() < 2e-5
    uniform = torch.full_like(upstream, -torch.log(torch.tensor(float(vocab_size))).item())
    uniform[rows] = logprobs[rows]
    assert (logprobs - uniform).abs().max() < 2e-5
    assert gradient[rows, labels[rows]].gt(0.1).all()
    assert torch.count_nonzero(gradient.abs().amax(1)) == rows.numel()


def test_the_gradient_may_take_the_memory_of_the_logits():
    torch.manual_seed(0)
    logits = torch.randn(512, 151936, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(151936, (512,), device="cuda")
    labels[::7] = torch.arange(0, 512, 7, device="cuda")
    upstream = torch.randn(512, device="cuda")
    _, want = _forward_and_backward(logits, labels, upstream)
    from xrpo_fast.ops import token_logprobs

    for _ in range(10):
        leaf = logits.clone().requires_grad_()
        logprobs = token_logprobs(leaf * 1, labels, inplace_backward=True).logprobs
        (got,) = torch.autograd.grad(logprobs, leaf, upstream)
        assert torch.equal(got, want)


def test_forward_and_backward_do_not_wait_for_the_gpu():
    logits = torch.randn(300, 32000, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(32000, (300,), device="cuda")
    upstream = torch.randn(300, device="cuda")
    mask = torch.rand(300, device="cuda") > 0.5
    temperature = torch.rand(300, device="cuda") + 0.5
    options = {"mask": mask, "temperature": temperature}
    _forward_and_backward(logits, labels, upstream, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _forward_and_backward(logits, labels, upstream, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _advantages(num_groups: int, **options):
    from xrpo_fast.ops import xrpo_advantages

    torch.manual_seed(0)
    sizes = torch.randint(0, 17, (num_groups,))
    cu_groups = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    num_seqs = int(cu_groups[-1])
    lengths = torch.randint(0, 60, (num_seqs,))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tensors = {
        "rewards": (torch.rand(num_seqs) > 0.5).float(),
        "token_logprobs": -torch.rand(int(cu_seqlens[-1])),
        "cu_seqlens": cu_seqlens,
        "cu_groups": cu_groups,
    }
    want = xrpo_advantages(
        **{k: _double(v) for k, v in tensors.items()}, backend="torch", **options
    )
    moved = {name: value.cuda() for name, value in tensors.items()}
    return want, moved, lambda: xrpo_advantages(**moved, **options)


def _double(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("num_groups", [1, 128, 8192], ids=["P1", "P128", "P8192"])
def test_advantages_of_ragged_groups(num_groups, scale):
    want, _, run = _advantages(num_groups, scale=scale)
    for name, expected, got in zip(want._fields, want, run(), strict=True):
        torch.testing.assert_close(
            got.cpu().double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True, msg=name
        )


def _launches(run) -> int:
    """Kernels that one warm call launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.events() or []
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)


def test_number_of_launches():
    from xrpo_fast.ops import token_logprobs

    logits = torch.randn(1024, 32768, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(32768, (1024,), device="cuda")
    assert _launches(lambda: token_logprobs(logits, labels)) == 1
    wide = torch.randn(4, 151936, device="cuda", dtype=torch.bfloat16)
    assert _launches(lambda: token_logprobs(wide, labels[:4])) == 2
    _, _, run = _advantages(128)
    assert _launches(run) == 1


def test_kernels_do_not_recompile_while_sizes_and_options_vary():
    from xrpo_fast.kernels import advantages, logprobs
    from xrpo_fast.ops import token_logprobs, xrpo_advantages

    def compiled(kernel) -> int:
        return sum(len(caches[0]) for caches in kernel.device_caches.values())

    kernels = (logprobs._token_logprobs_fwd_kernel, advantages._xrpo_advantages_kernel)
    before = [compiled(kernel) for kernel in kernels]
    for num_rows in (300, 301, 512, 1000):
        logits = torch.randn(num_rows, 16384, device="cuda", dtype=torch.bfloat16)
        labels = torch.randint(16384, (num_rows,), device="cuda")
        for mask in (None, labels > 5):
            for temperature in (1.0, 0.7, torch.ones(num_rows, device="cuda")):
                token_logprobs(logits, labels, mask=mask, temperature=temperature)
                token_logprobs(logits[1:, 8:], labels[1:], vocab_size=16000)
        rewards = torch.rand(num_rows, device="cuda")
        cu_groups = torch.tensor([0, num_rows // 3, num_rows], device="cuda")
        xrpo_advantages(rewards, scores=-rewards, cu_groups=cu_groups, eps=num_rows * 1e-9)
    after = [compiled(kernel) for kernel in kernels]
    assert all(b - a <= 2 for a, b in zip(before, after, strict=True)), (before, after)

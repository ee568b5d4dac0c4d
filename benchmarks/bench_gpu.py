"""GPU: the fused ops against what torch, TRL and Liger offer, with memory and share of bandwidth.

    pytest benchmarks/bench_gpu.py --benchmark-only [--benchmark-json FILE]

Groups are workloads, parameters are who does it. Values are checked before they are timed. A round
is one call, or several where a call is shorter than 100 us, and ends in a synchronisation; the
second-level cache is overwritten before each round. Bytes are the floor of the operation, whatever
the provider really moves, so that shares compare times. `benchmarks/gpu_table.py` prints the table.
"""

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xrpo_fast import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROUNDS = 20
FLUSH_BYTES = 256 << 20


@pytest.fixture(scope="session")
def copy_gb_per_s() -> float:
    """Bytes read plus written per second by a copy of 2 GiB, best of 10."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return 2 * source.numel() / min(seconds) / 1e9


@pytest.fixture
def measure(benchmark, copy_gb_per_s) -> Callable[..., None]:
    """measure(run, workload, provider, bytes_moved=None, calls=1, **extra): times run."""

    def run_rounds(
        run: Callable[[], object],
        workload: str,
        provider: str,
        bytes_moved: int | None = None,
        calls: int = 1,
        **extra: float,
    ) -> None:
        scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

        def flush() -> None:
            scratch.zero_()
            torch.cuda.synchronize()

        def timed() -> None:
            for _ in range(calls):
                run()
            torch.cuda.synchronize()

        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        benchmark.group = workload
        benchmark.pedantic(timed, setup=flush, rounds=ROUNDS, warmup_rounds=3)
        median_ms = benchmark.stats.stats.median * 1e3 / calls
        benchmark.extra_info.update(
            workload=workload,
            provider=provider,
            median_ms=median_ms,
            peak_mib=peak_mib,
            copy_gb_per_s=copy_gb_per_s,
            gpu=torch.cuda.get_device_name(),
            torch=torch.__version__,
            triton=importlib.import_module("triton").__version__,
            **extra,
        )
        if bytes_moved is not None:
            gb_per_s = bytes_moved / median_ms / 1e6
            rates = {"gb_per_s": gb_per_s, "copy_frac": gb_per_s / copy_gb_per_s}
            benchmark.extra_info.update(bytes_moved=bytes_moved, **rates)

    return run_rounds


def _eager(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)


def _logsumexp_gather(logits: Tensor, labels: Tensor) -> Tensor:
    x = logits.float()
    return x.gather(1, labels[:, None]).squeeze(1) - x.logsumexp(-1)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float(), labels, reduction="none")


def _ours(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    return ops.token_logprobs(logits, labels, **options).logprobs  # type: ignore[arg-type]


def _provider(name: str, require: Callable[[str], None]) -> Callable[..., Tensor]:
    """(logits (T, V), labels (T,)) -> log-probs (T,); skips what is not installed."""
    if name == "trl":
        require("trl")
        return importlib.import_module("trl.trainer.utils").selective_log_softmax
    if name == "liger":
        require("liger_kernel")
        function = importlib.import_module("liger_kernel.transformers.functional")
        return lambda logits, labels: (
            -function.liger_cross_entropy(logits, labels, reduction="none")
        )
    if name == "compile":
        torch._dynamo.reset()
        return torch.compile(_logsumexp_gather, dynamic=False)
    return {"ours": _ours, "eager": _eager, "cross_entropy": _cross_entropy}[name]


PROVIDERS = ["ours", "eager", "compile", "cross_entropy", "trl", "liger"]
SHAPES = {
    "8192x151936 bf16": (8192, 151936, torch.bfloat16),
    "8192x128256 bf16": (8192, 128256, torch.bfloat16),
    "8192x32000 bf16": (8192, 32000, torch.bfloat16),
    "8192x50257 bf16": (8192, 50257, torch.bfloat16),
    "4096x151936 fp32": (4096, 151936, torch.float32),
    "16x151936 bf16": (16, 151936, torch.bfloat16),
}


def _inputs(shape: str) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size, dtype = SHAPES[shape]
    needed = 6 * num_rows * vocab_size * 4
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    torch.manual_seed(0)
    logits = torch.empty(num_rows, vocab_size, dtype=dtype, device="cuda").normal_(0, 3)
    return logits, torch.randint(vocab_size, (num_rows,), device="cuda")


def _check(logprobs: Tensor, logits: Tensor, labels: Tensor, tolerance: float = 5e-5) -> None:
    """Against float64, on some rows."""
    rows = slice(None, None, max(1, logits.shape[0] // 16))
    x = logits[rows].double()
    want = x.gather(1, labels[rows, None]).squeeze(1) - x.logsumexp(-1)
    assert (logprobs[rows].double() - want).abs().max() <= tolerance


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_forward(measure, shape, provider, require):
    logits, labels = _inputs(shape)
    run = _provider(provider, require)
    # TRL and Liger round log-probs to bfloat16: up to 0.13 nats is what that costs them.
    _check(run(logits, labels), logits, labels, 0.13 if provider in ("trl", "liger") else 5e-5)
    # I/O: read logits, labels (8 bytes); write log-prob
    bytes_moved = logits.nbytes + 12 * labels.numel()
    calls = 10 if labels.numel() < 1000 else 1
    measure(lambda: run(logits, labels), f"logprob fwd {shape}", provider, bytes_moved, calls)


@pytest.mark.parametrize("variant", ["entropy", "half masked"])
def test_logprobs_forward_variants(measure, variant):
    shape = "8192x151936 bf16"
    logits, labels = _inputs(shape)
    is_scored = torch.arange(labels.numel(), device="cuda") % 2 == 0
    options = {"entropy": {"return_entropy": True}, "half masked": {"mask": is_scored}}[variant]
    _check(_ours(logits, labels, **options)[::2], logits[::2], labels[::2])
    # I/O: as the plain forward; half of it where half of the rows are masked
    bytes_moved = logits.nbytes // (2 if variant == "half masked" else 1) + 16 * labels.numel()
    measure(
        lambda: _ours(logits, labels, **options),
        f"logprob fwd {shape}",
        f"ours, {variant}",
        bytes_moved,
    )


@pytest.mark.parametrize("provider", [*PROVIDERS, "ours, in place", "ours, half without gradient"])
@pytest.mark.parametrize("shape", ["8192x128256 bf16", "4096x151936 fp32"])
def test_logprobs_forward_backward(measure, shape, provider, require):
    logits, labels = _inputs(shape)
    upstream = torch.randn(labels.numel(), device="cuda")
    if provider == "ours, half without gradient":
        upstream[::2] = 0
    name = provider.partition(",")[0]
    function = _provider(name, require)
    options = {"inplace_backward": True} if provider == "ours, in place" else {}

    def run() -> Tensor:
        # In place costs the logits: later rounds then see gradients, of the same size and dtype.
        leaf = logits.detach().requires_grad_()
        logprobs = function(leaf, labels, **options)
        return torch.autograd.grad(logprobs, leaf, upstream.to(logprobs.dtype))[0]

    sample = logits[1:2].double()
    want = -sample.softmax(-1) * upstream[1].double()
    got = run()[1:2].double()
    want[0, labels[1]] += upstream[1].double()
    limit = 2e-2 if name in ("trl", "liger") else 1e-2 if logits.dtype == torch.bfloat16 else 1e-4
    assert ((got - want).norm() / want.norm()) <= limit
    # I/O: forward reads logits; backward reads logits, writes their gradient
    measure(run, f"logprob fwd+bwd {shape}", provider, 3 * logits.nbytes + 40 * labels.numel())


@pytest.mark.parametrize("provider", ["ours", "bare GEMM", "F.linear_cross_entropy"])
@pytest.mark.parametrize("width", [2048, 4096], ids=["D2048", "D4096"])
@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_linear_logprobs(measure, direction, width, provider):
    num_rows, vocab_size = 8192, 151936
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab_size, width, device="cuda", dtype=torch.bfloat16) / width**0.5
    labels = torch.randint(vocab_size, (num_rows,), device="cuda")
    leaves = [x.requires_grad_(direction == "fwd+bwd") for x in (hidden, weight)]

    def ours() -> Tensor:
        return ops.linear_token_logprobs(hidden, weight, labels).logprobs

    def linear_cross_entropy() -> Tensor:
        return -F.linear_cross_entropy(hidden, weight, labels, reduction="none")  # type: ignore[attr-defined]

    def gemms() -> None:
        # The GEMMs of the forward, and of a backward that recomputes its logits: dH and dW.
        logits = hidden.detach() @ weight.detach().t()
        if direction == "fwd+bwd":
            del logits
            logits = hidden.detach() @ weight.detach().t()
            _ = logits @ weight.detach()
            _ = logits.t() @ hidden.detach()

    if provider == "F.linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no F.linear_cross_entropy")
    function = ours if provider == "ours" else linear_cross_entropy
    if provider != "bare GEMM":
        x = hidden.detach()[:64].double() @ weight.detach().double().t()
        want = x.gather(1, labels[:64, None]).squeeze(1) - x.logsumexp(-1)
        tolerance = 2e-4 if provider == "ours" else 5e-2
        assert (function()[:64].double() - want).abs().max() <= tolerance

    def run() -> None:
        if provider == "bare GEMM":
            gemms()
        elif direction == "fwd":
            function()
        else:
            torch.autograd.grad(function().sum(), leaves)

    materialised_mib = 2 * num_rows * vocab_size * 2 / 2**20
    workload = f"linear {direction} {num_rows}x{vocab_size} D={width} bf16"
    measure(run, workload, provider, materialised_mib=materialised_mib)


def _index_add_advantages(rewards: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """The plain advantage, vectorised: (r - mean) / (std + eps)."""
    zeros = rewards.new_zeros(num_groups)
    count = zeros.index_add(0, group, torch.ones_like(rewards))
    centered = rewards - (zeros.index_add(0, group, rewards) / count)[group]
    variance = zeros.index_add(0, group, centered.square()) / (count - 1).clamp(min=1)
    return centered / (variance.sqrt()[group] + 1e-6)


@pytest.mark.parametrize("provider", ["ours", "ours, scores and novelty", "index_add"])
@pytest.mark.parametrize("num_seqs", [1024, 65536])
def test_advantages(measure, num_seqs, provider):
    torch.manual_seed(0)
    sizes = torch.randint(1, 16, (num_seqs,))
    bounds = sizes.cumsum(0)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), bounds[bounds < num_seqs]])
    cu_groups = torch.cat([bounds, torch.tensor([num_seqs])])
    group = torch.repeat_interleave(torch.arange(len(bounds)), cu_groups.diff()).cuda()
    cu_groups, num_groups = cu_groups.cuda(), len(bounds)
    rewards = (torch.rand(num_seqs, device="cuda") > 0.5).float()
    token_logprobs = -torch.rand(num_seqs * 256, device="cuda")
    cu_seqlens = torch.arange(0, num_seqs * 256 + 1, 256, device="cuda", dtype=torch.int32)
    runs = {
        "ours": lambda: ops.group_advantages(rewards, cu_groups=cu_groups)[0],
        "ours, scores and novelty": lambda: (
            ops.xrpo_advantages(
                rewards, token_logprobs=token_logprobs, cu_seqlens=cu_seqlens, cu_groups=cu_groups
            ).base
        ),
        "index_add": lambda: _index_add_advantages(rewards, group, num_groups),
    }
    want = _index_add_advantages(rewards.double(), group, num_groups)
    assert (runs[provider]().double() - want).abs().max() < 1e-5
    measure(runs[provider], f"advantages {num_seqs} ragged rows", provider, calls=20)

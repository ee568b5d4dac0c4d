"""What only the C++ kernels promise: instruction sets, threads, sizes, memory."""

import threading

import pytest
import torch
from torch import Tensor

from xrpo_fast import _native
from xrpo_fast.kernels import reference
from xrpo_fast.ops import token_logprobs


@pytest.fixture
def best_isa():
    yield _native.logprob_isa()
    _native.limit_logprob_isa("avx512")


def step(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    x = logits.detach().requires_grad_()
    result = token_logprobs(x, labels, temperature=0.8, return_entropy=True, backend="cpp")
    (dx,) = torch.autograd.grad((result.logprobs - 0.2 * result.entropy).sum(), x)
    return result.logprobs.detach(), result.entropy.detach(), dx


def make(num_rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(num_rows, columns, generator=generator)
    logits[0, ::7] = -float("inf")
    return logits.to(dtype), torch.randint(1, columns, (num_rows,), generator=generator)


@pytest.mark.parametrize("columns", [9, 4111])
def test_instruction_sets_agree(columns, dtype, best_isa):
    logits, labels = make(5, columns, dtype)
    labels[0] = 1
    results = []
    for limit in ("avx512", "avx2", "base"):
        _native.limit_logprob_isa(limit)
        results.append(step(logits, labels))
    spacing = torch.finfo(dtype).eps
    for other in results[1:]:
        torch.testing.assert_close(results[0][0], other[0], rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(results[0][1], other[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[0][2], other[2], rtol=max(spacing, 2e-5), atol=2e-7)


def test_limit_is_checked():
    with pytest.raises(ValueError, match="limit: expected avx512, avx2 or base, got sse"):
        _native.limit_logprob_isa("sse")


def test_every_float16_and_bfloat16_is_read_and_written_exactly(best_isa):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype)
        values = values[values.isfinite()]
        logits = torch.stack([values, torch.zeros_like(values)], dim=1)
        exact, _, _, _ = reference.token_logprobs_fwd(
            logits.double(), torch.zeros(len(values), dtype=torch.int64), 1.0, None, 2, False
        )
        for limit in ("avx512", "base"):
            _native.limit_logprob_isa(limit)
            x = logits.clone().requires_grad_()
            result = token_logprobs(x, torch.zeros(len(values), dtype=torch.int64))
            allowed = 2e-6 + 1e-6 * (exact.abs() + values.double().abs())
            assert bool(((result.logprobs.double() - exact).abs() <= allowed).all())
            (dx,) = torch.autograd.grad(result.logprobs.sum(), x)
            true = (-exact.expm1())[:, None] * torch.tensor([1.0, -1.0], dtype=torch.float64)
            size = true.abs().clamp(min=torch.finfo(dtype).tiny).log2().floor().exp2()
            allowed = size * torch.finfo(dtype).eps + 1e-7
            assert bool(((dx.double() - true).abs() <= allowed).all())


@pytest.mark.parametrize(("num_rows", "columns"), [(1, 20_000), (3, 9001), (40, 700)])
def test_threads_do_not_change_a_bit(num_rows, columns, dtype):
    logits, labels = make(num_rows, columns, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(step(logits, labels))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert torch.equal(one, same)


def test_calls_from_several_threads_at_once():
    logits, labels = make(64, 5000, torch.float32)
    expected = step(logits, labels)
    failures = []

    def work() -> None:
        for _ in range(5):
            if not all(
                torch.equal(a, b) for a, b in zip(step(logits, labels), expected, strict=True)
            ):
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_more_rows_than_a_grid_axis_takes():
    # Liger #1294: 65,536 rows.
    logits = torch.arange(70_001)[:, None].expand(70_001, 3).float() * torch.tensor(
        [0.0, 1e-4, -1e-4]
    )
    labels = torch.arange(70_001) % 3
    result = token_logprobs(logits, labels)
    exact = logits.double().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(result.logprobs.double(), exact, rtol=1e-6, atol=2e-6)


def test_more_elements_than_int32_counts():
    # TRL #7266: rows behind 2^31 elements. Overlapping rows (stride 1) of a small buffer describe
    # 2.2e9 elements in a few megabytes; the last rows are scored, the others are masked.
    num_rows, columns = 1100, 2_000_003
    buffer = torch.randn(columns + num_rows, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = buffer.as_strided((num_rows, columns), (1, 1))
    assert logits.numel() > 2**31
    labels = torch.full((num_rows,), columns - 1)
    mask = torch.arange(num_rows) >= num_rows - 3
    result = token_logprobs(logits, labels, mask=mask)
    exact = logits[-3:].double().log_softmax(-1)[:, -1]
    torch.testing.assert_close(result.logprobs[-3:].double(), exact, rtol=1e-6, atol=2e-5)
    assert torch.equal(result.logprobs[:-3], torch.zeros(num_rows - 3))


@pytest.mark.slow
def test_row_offset_beyond_int32():
    # 4.6 GB of address space behind one bfloat16 row stride; only pages of two rows are touched.
    stride, columns = 1_150_000_000, 151_936
    storage = torch.UntypedStorage(2 * (2 * stride + columns))
    logits = torch.tensor([], dtype=torch.bfloat16).set_(storage, 0, (3, columns), (stride, 1))
    generator = torch.Generator().manual_seed(0)
    for row in (0, 2):
        logits[row] = torch.randn(columns, generator=generator).bfloat16()
    labels = torch.tensor([5, 5, 7])
    result = token_logprobs(logits, labels, mask=torch.tensor([True, False, True]))
    for row in (0, 2):
        exact = logits[row].double().log_softmax(-1)[labels[row]]
        torch.testing.assert_close(result.logprobs[row].double(), exact, rtol=1e-6, atol=1e-5)


def test_forward_takes_little_memory():
    # Peak resident memory of a child process, beside what the logits take.
    import subprocess
    import sys

    code = """
import resource, torch
from xrpo_fast.ops import token_logprobs
logits, labels = torch.zeros(2000, 8192), torch.zeros(2000, dtype=torch.int64)
token_logprobs(logits[:8], labels[:8])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_logprobs(logits, labels)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * 1024, "KiB for 2000 rows"

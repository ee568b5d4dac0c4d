"""torch.library, autograd and torch.compile around the ops, on CPU tensors."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from xrpo_fast.ops import (
    group_advantages,
    linear_token_logprobs,
    sequence_logprobs,
    token_logprobs,
    xrpo_advantages,
)

CPU_BACKENDS = ("torch", "cpp")


@pytest.fixture(params=CPU_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def arguments(backend: str) -> dict[str, list[tuple]]:
    """Calls of the private ops that between them use every argument."""
    labels = torch.tensor([1, 4, 0, 6])
    mask = torch.tensor([True, False, True, True])
    scale = torch.tensor([0.5, 1.0, 2.0, 0.7])
    rewards, scores = torch.tensor([1.0, 0.0, 1.0, 0.0]), random(4)
    cu_groups = torch.tensor([0, 1, 4])
    logits = random(4, 9).requires_grad_()
    hidden, weight = random(4, 5).requires_grad_(), random(9, 5, seed=1).requires_grad_()
    bias = random(9, seed=2).requires_grad_()
    tokens = random(6).requires_grad_()
    return {
        "token_logprobs": [
            (logits, labels, 0.7, None, None, 9, True, backend, False),
            (logits, labels, 1.0, scale, mask, 8, False, backend, True),
            (
                random(2, 3, 9)[:, :2].requires_grad_(),
                labels.view(2, 2),
                1.0,
                None,
                None,
                9,
                True,
                backend,
                False,
            ),
        ],
        "linear_token_logprobs": [
            (hidden, weight, bias, labels, 0.7, None, mask, None, 8, True, 72, backend, False),
            (
                hidden,
                weight,
                None,
                labels,
                1.0,
                scale,
                None,
                torch.tensor([3, 0]),
                9,
                False,
                1 << 20,
                backend,
                False,
            ),
        ],
        "sequence_logprobs": [(tokens, torch.tensor([0, 2, 2, 6]), "mean", backend, False)],
        "xrpo_advantages": [
            (
                rewards,
                scores,
                None,
                None,
                None,
                cu_groups,
                mask,
                1.0,
                ~mask,
                2.5,
                0.5,
                "group",
                1,
                1e-6,
                backend,
                False,
            ),
            (
                rewards,
                None,
                random(6),
                torch.tensor([0, 1, 1, 4, 6]),
                None,
                cu_groups,
                None,
                1.0,
                None,
                2.5,
                0.5,
                "batch",
                0,
                0.0,
                backend,
                True,
            ),
        ],
    }


@pytest.mark.parametrize("op", list(arguments("torch")))
def test_opcheck(op, backend):
    for call in arguments(backend)[op]:
        torch.library.opcheck(getattr(torch.ops.xrpo_fast, op).default, call)


def test_opcheck_of_the_backward_ops(backend):
    logits, labels = random(4, 9), torch.tensor([1, 4, 0, 12])
    call = (logits, labels, 0.7, None, None, 9, True, backend, False)
    _, entropy, row_max, row_sum = torch.ops.xrpo_fast.token_logprobs(*call)
    torch.library.opcheck(
        torch.ops.xrpo_fast.token_logprobs_backward.default,
        (
            random(4),
            random(4),
            logits,
            labels,
            0.7,
            None,
            None,
            9,
            row_max,
            row_sum,
            entropy,
            backend,
        ),
    )


def test_gradcheck_of_token_logprobs(backend):
    logits = random(5, 7, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([0, 6, 3, 2, 5])
    mask = torch.tensor([True, True, False, True, True])
    scale = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3])

    def run(x: Tensor) -> tuple[Tensor, Tensor | None]:
        options = {"temperature": scale, "mask": mask, "vocab_size": 7, "return_entropy": True}
        return tuple(token_logprobs(x, labels, backend=backend, **options))

    assert torch.autograd.gradcheck(run, (logits,), atol=1e-8, rtol=1e-6)


def test_gradcheck_of_linear_token_logprobs(backend):
    hidden = random(6, 4, dtype=torch.float64).requires_grad_()
    weight = random(7, 4, seed=1, dtype=torch.float64).requires_grad_()
    bias = random(7, seed=2, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([0, 6, 3, 2, 5, 1])

    def run(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor | None]:
        options = {"temperature": 0.8, "return_entropy": True, "chunk_bytes": 2 * 7 * 8}
        return tuple(linear_token_logprobs(h, w, labels, bias=b, backend=backend, **options))

    assert torch.autograd.gradcheck(run, (hidden, weight, bias), atol=1e-8, rtol=1e-6)


def test_gradcheck_of_sequence_logprobs(backend):
    tokens = random(9, dtype=torch.float64).requires_grad_()
    cu_seqlens = torch.tensor([0, 4, 4, 5, 9])
    for normalize in ("mean", "sum"):

        def run(x: Tensor, normalize: str = normalize) -> Tensor:
            return sequence_logprobs(x, cu_seqlens, normalize=normalize, backend=backend).scores

        assert torch.autograd.gradcheck(run, (tokens,), atol=1e-8, rtol=1e-6)


def test_float64_agrees_to_ten_digits():
    logits, labels = random(5, 300, dtype=torch.float64), torch.arange(5)
    results = []
    for name in CPU_BACKENDS:
        x = logits.clone().requires_grad_()
        result = token_logprobs(x, labels, temperature=0.6, return_entropy=True, backend=name)
        (dx,) = torch.autograd.grad((result.logprobs - result.entropy).sum(), x)
        results.append((result.logprobs, result.entropy, dx))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_second_derivative_is_refused(backend):
    x = random(3, 5).requires_grad_()
    loss = token_logprobs(x, torch.tensor([0, 1, 2]), backend=backend).logprobs.square().sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="expected one derivative, got two"):
        dx.sum().backward()


def test_compiled_step_equals_eager(backend):
    """Log-probs, scores and advantages in one graph, forward and backward."""
    labels, cu_seqlens = torch.arange(8) % 5, torch.tensor([0, 3, 5, 8])
    rewards, groups = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 3])

    def step(logits: Tensor) -> Tensor:
        result = token_logprobs(logits, labels, return_entropy=True, backend=backend)
        scores = sequence_logprobs(result.logprobs, cu_seqlens, backend=backend).scores
        advantages = xrpo_advantages(rewards, scores=scores, cu_groups=groups, backend=backend)
        plain = group_advantages(rewards, group_ids=torch.tensor([2, 2, 2]), backend=backend)
        weight = (advantages.advantages + plain.advantages).repeat_interleave(
            cu_seqlens.diff(), output_size=8
        )
        return -(weight * result.logprobs).mean() - 0.01 * result.entropy.mean()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        x = random(8, 11).requires_grad_()
        loss = function(x)
        loss.backward()
        results.append((loss.detach(), x.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_compiled_linear_equals_eager(backend):
    labels = torch.arange(6)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_token_logprobs(hidden, weight, labels, backend=backend).logprobs.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        h, w = random(6, 4).requires_grad_(), random(9, 4, seed=1).requires_grad_()
        function(h, w).backward()
        results.append((h.grad, w.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_few_recompiles_while_shapes_and_temperature_vary(backend):
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def logprobs(logits: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
        return token_logprobs(logits, labels, temperature=temperature, backend=backend).logprobs

    @torch.compile(backend=counter, fullgraph=True)
    def advantages(rewards: Tensor, scores: Tensor, cu_groups: Tensor) -> Tensor:
        return xrpo_advantages(
            rewards, scores=scores, cu_groups=cu_groups, backend=backend
        ).advantages

    for num_rows in (5, 6, 9, 17, 64):
        logprobs(
            random(num_rows, 11),
            torch.zeros(num_rows, dtype=torch.int64),
            torch.tensor(0.1 * num_rows),
        )
    assert counter.frame_count <= 2
    counter.clear()
    for num_seqs in (5, 6, 9, 17, 64):
        cu_groups = torch.tensor([0, *range(2, num_seqs, 3), num_seqs])
        advantages(random(num_seqs), random(num_seqs), cu_groups)
    assert counter.frame_count <= 2


def test_inplace_backward_takes_the_memory_of_the_logits(backend):
    base = random(4, 9, seed=3)
    labels = torch.tensor([0, 1, 2, 3])
    plain = base.clone().requires_grad_()
    token_logprobs(plain * 1.0, labels, backend=backend).logprobs.sum().backward()

    leaf = base.clone().requires_grad_()
    logits = leaf * 1.0
    before = logits._version
    result = token_logprobs(logits, labels, inplace_backward=True, backend=backend)
    assert torch.equal(logits, leaf)
    result.logprobs.sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=0, atol=0)
    torch.testing.assert_close(logits.detach(), plain.grad, rtol=0, atol=0)
    assert logits._version > before


def test_inplace_backward_of_strided_logits_with_entropy(backend):
    labels = torch.arange(6).view(2, 3)
    grads = []
    for inplace in (False, True):
        leaf = random(2, 4, 8).requires_grad_()
        logits = (leaf * 1.0)[:, :3]
        result = token_logprobs(
            logits,
            labels,
            vocab_size=7,
            return_entropy=True,
            inplace_backward=inplace,
            backend=backend,
        )
        (result.logprobs - result.entropy).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_inplace_backward_twice_on_the_same_logits_is_an_error(backend):
    # verl #2484: the second backward would read gradients as logits.
    logits = random(3, 5).requires_grad_() * 1.0
    labels = torch.tensor([0, 1, 2])
    one = token_logprobs(logits, labels, inplace_backward=True, backend=backend).logprobs.sum()
    two = token_logprobs(logits, labels, inplace_backward=True, backend=backend).logprobs.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (one + two).backward()


def test_logits_are_never_changed(backend):
    logits = random(3, 5).requires_grad_()
    kept, version = logits.detach().clone(), logits._version
    token_logprobs(
        logits, torch.tensor([0, 1, 9]), temperature=0.5, backend=backend
    ).logprobs.sum().backward()
    assert torch.equal(logits.detach(), kept)
    assert logits._version == version


def test_inplace_backward_is_refused_under_compile(backend):
    def run(logits: Tensor) -> Tensor:
        labels = torch.zeros(2, dtype=torch.int64)
        return token_logprobs(logits, labels, inplace_backward=True, backend=backend).logprobs

    with pytest.raises(Exception, match=r"inplace_backward: expected False under torch\.compile"):
        torch.compile(run, fullgraph=True, backend="eager")(random(2, 5).requires_grad_())

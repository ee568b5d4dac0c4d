"""torch.library ops behind `linear_token_logprobs`.

Legend: T tokens (rows), V vocabulary, D model width.

Rows are taken in chunks: one GEMM gives float32 logits of a chunk, the fused pass reduces them (or,
in the backward, replaces them by their gradient), and the next chunk overwrites them. The backward
computes the logits again: keeping them would take T V floats.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xrpo_fast.ops.backends import LIBRARY, launcher
from xrpo_fast.ops.lm_head import LmHead
from xrpo_fast.ops.logprobs_op import check_values, row_temperature


def _chosen_rows(wanted: Tensor | None, active_rows: Tensor | None) -> Tensor | None:
    """Rows to compute, (n,) int64; None: all. `wanted` (T,) counts where that is no sync."""
    if wanted is None or wanted.device.type != "cpu":
        return active_rows
    if active_rows is None:
        return wanted.nonzero().squeeze(1)
    return active_rows[wanted[active_rows]]


def _take(value: Any, rows: Tensor | slice) -> Any:
    """The rows' entries of a per-row argument; a float, a single entry or None stays."""
    if not isinstance(value, Tensor) or (value.ndim == 1 and value.shape[0] == 1):
        return value
    return value[rows].contiguous()


def _chunks(
    rows: Tensor | None, num_rows: int, columns: int, dtype: torch.dtype, chunk_bytes: int
) -> Iterator[Tensor | slice]:
    """`rows` (or all) in pieces whose logits take at most chunk_bytes."""
    step = max(1, chunk_bytes // (columns * dtype.itemsize))
    total = num_rows if rows is None else rows.shape[0]
    for start in range(0, total, step):
        part = slice(start, min(start + step, total))
        yield part if rows is None else rows[part]


def _buffer(rows: Tensor | None, head: LmHead, num_rows: int, chunk_bytes: int) -> Tensor:
    """Room for the largest chunk's logits."""
    columns = head.weight.shape[0]
    total = num_rows if rows is None else rows.shape[0]
    step = max(1, chunk_bytes // (columns * head.dtype.itemsize))
    return torch.empty((min(step, total), columns), dtype=head.dtype, device=head.weight.device)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    mask: Tensor | None,
    active_rows: Tensor | None,
    vocab_size: int,
    return_entropy: bool,
    chunk_bytes: int,
    backend: str,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values(temperatures, validate)
    launch = launcher(backend, "logprobs", "token_logprobs_fwd")
    head = LmHead(weight, bias, vocab_size)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    num_rows = hidden.shape[0]
    y, m = labels.reshape(-1), None if mask is None else mask.reshape(-1)
    scale = row_temperature(temperature, temperatures)
    logprobs = torch.zeros(num_rows, dtype=head.dtype, device=hidden.device)
    entropy = logprobs.new_zeros(num_rows if return_entropy else 0)
    row_max, row_sum = torch.zeros_like(logprobs), torch.ones_like(logprobs, dtype=torch.float64)
    rows = _chosen_rows(m, active_rows)
    buffer = _buffer(rows, head, num_rows, chunk_bytes)
    for part in _chunks(rows, num_rows, vocab_size, head.dtype, chunk_bytes):
        states = hidden[part]
        logits = buffer[: states.shape[0]]
        head.logits(states, logits)
        results = launch(
            logits, _take(y, part), _take(scale, part), _take(m, part), vocab_size, return_entropy
        )
        for target, values in zip((logprobs, entropy, row_max, row_sum), results, strict=True):
            if values.numel() > 0:
                target[part] = values
    shape = labels.shape
    return (
        logprobs.view(shape),
        entropy.view(shape) if return_entropy else entropy,
        row_max,
        row_sum,
    )


def _forward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return_entropy = rest[5]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return (
        hidden.new_empty(labels.shape, dtype=dtype),
        hidden.new_empty(labels.shape if return_entropy else (0,), dtype=dtype),
        hidden.new_empty((labels.numel(),), dtype=dtype),
        hidden.new_empty((labels.numel(),), dtype=torch.float64),
    )


def _backward(
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    mask: Tensor | None,
    active_rows: Tensor | None,
    vocab_size: int,
    row_max: Tensor,
    row_sum: Tensor,
    entropy: Tensor | None,
    chunk_bytes: int,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    launch = launcher(backend, "logprobs", "token_logprobs_bwd")
    head = LmHead(weight, bias, vocab_size)
    states = hidden.reshape(-1, hidden.shape[-1])
    per_row = [
        None if x is None else x.reshape(-1) for x in (dlogprobs, dentropy, labels, mask, entropy)
    ]
    g, ge, y, m, h = per_row
    assert g is not None
    wanted = g != 0 if ge is None else (g != 0) | (ge != 0)
    wanted = wanted if m is None else wanted & m
    scale = row_temperature(temperature, temperatures)
    dhidden = torch.zeros(states.shape if needs[0] else (0,), dtype=hidden.dtype, device=g.device)
    dweight = torch.zeros(weight.shape if needs[1] else (0,), dtype=head.dtype, device=g.device)
    dbias = torch.zeros(weight.shape[0] if needs[2] else 0, dtype=head.dtype, device=g.device)
    rows = _chosen_rows(wanted, active_rows)
    buffer = _buffer(rows, head, states.shape[0], chunk_bytes)
    for part in _chunks(rows, states.shape[0], vocab_size, head.dtype, chunk_bytes):
        x = states[part]
        logits = buffer[: x.shape[0]]
        head.logits(x, logits)
        launch(
            *(_take(v, part) for v in (g, ge)), logits, _take(y, part), _take(scale, part),
            _take(m, part), vocab_size, row_max[part], row_sum[part], _take(h, part), logits,
        )  # fmt: skip
        if needs[0]:
            dhidden[part] = head.dhidden(logits).to(hidden.dtype)
        if needs[1]:
            # A row without gradient may hold anything, NaN too.
            x = torch.where(wanted[part][:, None], x, 0)
            head.add_dweight(logits, x, dweight[:vocab_size])
        if needs[2]:
            dbias[:vocab_size] += logits.sum(0)
    return (
        dhidden.view(hidden.shape if needs[0] else (0,)),
        dweight.to(weight.dtype),
        dbias.to(weight.dtype),
    )


def _backward_fake(
    dlogprobs: Tensor, dentropy: Tensor | None, hidden: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs = rest[-2]
    return (
        hidden.new_empty(hidden.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,)),
        weight.new_empty((weight.shape[0] if needs[2] else 0,)),
    )


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, temperature, temperatures, mask, active_rows = inputs[:8]
    vocab_size, return_entropy, chunk_bytes, backend, _ = inputs[8:]
    _, entropy, row_max, row_sum = output
    ctx.mark_non_differentiable(row_max, row_sum)
    ctx.save_for_backward(
        hidden, weight, bias, labels, temperatures, mask, active_rows, row_max, row_sum,
        entropy if return_entropy else None,
    )  # fmt: skip
    ctx.constants = (temperature, vocab_size, chunk_bytes, backend)


def _autograd(
    ctx: Any, dlogprobs: Tensor | None, dentropy: Tensor | None, *_: Tensor | None
) -> tuple:
    hidden, weight, bias, labels, temperatures, mask, active_rows, row_max, row_sum, entropy = (
        ctx.saved_tensors
    )
    temperature, vocab_size, chunk_bytes, backend = ctx.constants
    if dlogprobs is None:
        dlogprobs = torch.zeros(labels.shape, dtype=row_max.dtype, device=labels.device)
    if entropy is None:
        dentropy = None
    needs = [*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2]]
    gradients = torch.ops.xrpo_fast.linear_token_logprobs_backward(
        dlogprobs, dentropy, hidden, weight, bias, labels, temperature, temperatures, mask,
        active_rows, vocab_size, row_max, row_sum, entropy, chunk_bytes, needs, backend,
    )  # fmt: skip
    return (*(d if need else None for d, need in zip(gradients, needs, strict=True)), *[None] * 10)


def _no_double_backward(ctx: Any, *_: Tensor | None) -> None:
    raise NotImplementedError(
        "linear_token_logprobs: expected one derivative, got two; the backward of this op has none"
    )


LIBRARY.define(
    "linear_token_logprobs(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, "
    "float temperature, Tensor? temperatures, Tensor? mask, Tensor? active_rows, "
    "SymInt vocab_size, bool return_entropy, SymInt chunk_bytes, str backend, bool validate) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "linear_token_logprobs_backward(Tensor dlogprobs, Tensor? dentropy, Tensor hidden, "
    "Tensor weight, Tensor? bias, Tensor labels, float temperature, Tensor? temperatures, "
    "Tensor? mask, Tensor? active_rows, SymInt vocab_size, Tensor row_max, Tensor row_sum, "
    "Tensor? entropy, SymInt chunk_bytes, bool[] needs, str backend) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.impl("linear_token_logprobs", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("linear_token_logprobs_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("xrpo_fast::linear_token_logprobs", _forward_fake, lib=LIBRARY)
torch.library.register_fake(
    "xrpo_fast::linear_token_logprobs_backward", _backward_fake, lib=LIBRARY
)
torch.library.register_autograd(
    "xrpo_fast::linear_token_logprobs", _autograd, setup_context=_save, lib=LIBRARY
)
torch.library.register_autograd(
    "xrpo_fast::linear_token_logprobs_backward", _no_double_backward, lib=LIBRARY
)

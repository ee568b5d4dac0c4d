"""torch.library ops behind `token_logprobs`. Legend: T rows, V vocabulary.

A launcher takes rows (T, V) of one stride. Logits whose rows have none, such as logits[:, :-1] or a
transposed batch, go to it in several views (`row_blocks`), never as a copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xrpo_fast.ops import checks
from xrpo_fast.ops.backends import LIBRARY, launcher


def row_blocks(rows: Tensor) -> list[Tensor]:
    """(..., V) as views (n, V), in order: one, where one row stride describes all."""
    if rows.ndim == 2:
        return [rows]
    try:
        return [rows.view(-1, rows.shape[-1])]
    except RuntimeError:
        return [block for part in rows.unbind(0) for block in row_blocks(part)]


def row_temperature(temperature: float, temperatures: Tensor | None) -> float | Tensor:
    """What launchers take: a float, or a float32 tensor of shape (1,) or (T,)."""
    return temperature if temperatures is None else temperatures.reshape(-1).contiguous()


def check_values(temperatures: Tensor | None, validate: bool) -> None:
    if temperatures is not None and (validate or temperatures.device.type == "cpu"):
        checks.positive_values("temperature", temperatures)


class _Rows:
    """The per-row arguments, flat, cut like `row_blocks(logits)`."""

    def __init__(self, logits: Tensor, *per_row: float | Tensor | None) -> None:
        self.blocks = row_blocks(logits)
        self.per_row = per_row

    def __iter__(self):
        start = 0
        for block in self.blocks:
            stop = start + block.shape[0]
            yield block, [self._cut(value, start, stop) for value in self.per_row]
            start = stop

    @staticmethod
    def _cut(value: float | Tensor | None, start: int, stop: int) -> float | Tensor | None:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return value
        return value[start:stop]


def _flat(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.reshape(-1).contiguous()


def _forward(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    mask: Tensor | None,
    vocab_size: int,
    return_entropy: bool,
    backend: str,
    validate: bool,
) -> tuple[Tensor, ...]:
    check_values(temperatures, validate)
    launch = launcher(backend, "logprobs", "token_logprobs_fwd")
    scale = row_temperature(temperature, temperatures)
    results: list[Sequence[Tensor]] = [
        launch(block, block_labels, block_scale, block_mask, vocab_size, return_entropy)
        for block, (block_labels, block_scale, block_mask) in _Rows(
            logits, _flat(labels), scale, _flat(mask)
        )
        if block.shape[0] > 0
    ]
    if not results:
        return _forward_fake(
            logits,
            labels,
            temperature,
            temperatures,
            mask,
            vocab_size,
            return_entropy,
            backend,
            validate,
        )
    parts = (
        results[0]
        if len(results) == 1
        else [torch.cat(part) for part in zip(*results, strict=True)]
    )
    logprobs, entropy, row_max, row_sum = parts
    entropy = entropy.view(labels.shape) if return_entropy else entropy
    return logprobs.view(labels.shape), entropy, row_max, row_sum


def _forward_fake(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    mask: Tensor | None,
    vocab_size: int,
    return_entropy: bool,
    backend: str,
    validate: bool,
) -> tuple[Tensor, ...]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return (
        logits.new_empty(labels.shape, dtype=dtype),
        logits.new_empty(labels.shape if return_entropy else (0,), dtype=dtype),
        logits.new_empty((labels.numel(),), dtype=dtype),
        logits.new_empty((labels.numel(),), dtype=torch.float64),
    )


def _backward_into(
    out: Tensor,
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    mask: Tensor | None,
    vocab_size: int,
    row_max: Tensor,
    row_sum: Tensor,
    entropy: Tensor | None,
    backend: str,
) -> None:
    launch = launcher(backend, "logprobs", "token_logprobs_bwd")
    scale = row_temperature(temperature, temperatures)
    per_row = (_flat(dlogprobs), _flat(dentropy), _flat(labels), scale, _flat(mask))
    rows = _Rows(logits, *per_row, row_max, row_sum, _flat(entropy))
    offset = 0
    for block, (g, ge, y, t, m, top, total, h) in rows:
        if block.shape[0] > 0:
            target = (
                block if out is logits else out.view(-1, out.shape[-1])[offset:][: block.shape[0]]
            )
            launch(g, ge, block, y, t, m, vocab_size, top, total, h, target)
        offset += block.shape[0]


def _backward(
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    mask: Tensor | None,
    vocab_size: int,
    row_max: Tensor,
    row_sum: Tensor,
    entropy: Tensor | None,
    backend: str,
) -> Tensor:
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _backward_into(
        out, dlogprobs, dentropy, logits, labels, temperature, temperatures, mask, vocab_size,
        row_max, row_sum, entropy, backend,
    )  # fmt: skip
    return out


def _backward_fake(
    dlogprobs: Tensor, dentropy: Tensor | None, logits: Tensor, *rest: Any
) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    logits, labels, temperature, temperatures, mask, vocab_size, return_entropy, backend, _ = inputs
    _, entropy, row_max, row_sum = output
    ctx.mark_non_differentiable(row_max, row_sum)
    ctx.save_for_backward(
        logits, labels, temperatures, mask, row_max, row_sum, entropy if return_entropy else None
    )
    ctx.constants = (temperature, vocab_size, backend)


def _gradient(ctx: Any, dlogprobs: Tensor | None, dentropy: Tensor | None) -> tuple:
    """Arguments of the backward op from what `_save` kept."""
    logits, labels, temperatures, mask, row_max, row_sum, entropy = ctx.saved_tensors
    temperature, vocab_size, backend = ctx.constants
    if dlogprobs is None:
        dlogprobs = torch.zeros(labels.shape, dtype=row_max.dtype, device=labels.device)
    if entropy is None:
        dentropy = None
    return (
        dlogprobs, dentropy, logits, labels, temperature, temperatures, mask, vocab_size,
        row_max, row_sum, entropy if dentropy is not None else None, backend,
    )  # fmt: skip


def _autograd(
    ctx: Any, dlogprobs: Tensor | None, dentropy: Tensor | None, *_: Tensor | None
) -> tuple:
    dlogits = torch.ops.xrpo_fast.token_logprobs_backward(*_gradient(ctx, dlogprobs, dentropy))
    return (dlogits, *[None] * 8)


def _no_double_backward(ctx: Any, *_: Tensor | None) -> None:
    raise NotImplementedError(
        "token_logprobs: expected one derivative, got two; the backward of this op has none"
    )


class InplaceBackward(torch.autograd.Function):
    """`token_logprobs` whose gradient takes the memory of the logits."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = torch.ops.xrpo_fast.token_logprobs(*inputs)
        _save(ctx, inputs, output)
        return output[0], output[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        dlogprobs, dentropy, logits, *rest = _gradient(ctx, *grads)
        logits = logits.detach()
        _backward_into(logits, dlogprobs, dentropy, logits, *rest)
        # Kernels write behind autograd's back; a detached tensor shares the version counter.
        torch.autograd.graph.increment_version(logits)
        return (logits, *[None] * 8)


LIBRARY.define(
    "token_logprobs(Tensor logits, Tensor labels, float temperature, Tensor? temperatures, "
    "Tensor? mask, SymInt vocab_size, bool return_entropy, str backend, bool validate) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "token_logprobs_backward(Tensor dlogprobs, Tensor? dentropy, Tensor logits, Tensor labels, "
    "float temperature, Tensor? temperatures, Tensor? mask, SymInt vocab_size, Tensor row_max, "
    "Tensor row_sum, Tensor? entropy, str backend) -> Tensor"
)
LIBRARY.impl("token_logprobs", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("token_logprobs_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("xrpo_fast::token_logprobs", _forward_fake, lib=LIBRARY)
torch.library.register_fake("xrpo_fast::token_logprobs_backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd(
    "xrpo_fast::token_logprobs", _autograd, setup_context=_save, lib=LIBRARY
)
torch.library.register_autograd(
    "xrpo_fast::token_logprobs_backward", _no_double_backward, lib=LIBRARY
)

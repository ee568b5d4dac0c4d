"""Log-probs (and entropies) of given tokens from logits, without a copy of the logits.

Legend: T scored tokens (rows), V vocabulary, B, L batch and padded length.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xrpo_fast.ops import checks
from xrpo_fast.ops.backends import LIBRARY, launcher, resolve


class TokenLogprobs(NamedTuple):
    """What `token_logprobs` and `linear_token_logprobs` return, in the shape of `labels`."""

    logprobs: Tensor
    """float32 (float64 for float64 input), nats; differentiable."""
    entropy: Tensor | None
    """Like logprobs, nats, of the whole distribution; differentiable; None unless asked for."""


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
    validate: bool = False,
) -> TokenLogprobs:
    """Log-prob of each label under softmax(logits / temperature), and the entropy of each row.

        logprob = x_y / temperature - log sum_v exp(x_v / temperature)

    Args:
        logits:      (T, V) or (B, L, V) float32, bfloat16, float16 (float64 on cpp and torch); any row
                     strides, stride(-1) == 1. Never copied, never changed.
        labels:      logits.shape[:-1], int32 or int64.
        temperature: > 0: a float (a constant under torch.compile), or a float32 tensor, 0-d or one per
                     row (never recompiles). It has no gradient.
        mask:        logits.shape[:-1] bool, True = scored. An unscored row is never read: logprob, entropy
                     and gradient are 0, whatever its logits and label.
        vocab_size:  columns from here on are padding: ignored, gradient 0. Default V.
        inplace_backward: write the gradient over the logits (eager mode only).
        backend:     "auto" (triton for CUDA, cpp for CPU), "triton", "cpp" or "torch".
        validate:    check tensor values on CUDA too, which costs a sync.
    Returns:
        TokenLogprobs: logprobs and entropy (None unless return_entropy), both differentiable.
    Raises:
        ValueError, TypeError: wrong dtype, shape, stride, device, temperature, or a backend that cannot run.
    Notes:
        A scored row with a label outside 0..vocab_size-1 gives NaN and no gradient. The result of a row
        does not depend, to the bit, on other rows. Extra memory: 16 bytes per row.
    """
    _check_logits(logits)
    checks.like_rows("labels", labels, checks.INDICES, "logits", logits)
    if mask is not None:
        checks.like_rows("mask", mask, (torch.bool,), "logits", logits)
    checks.temperature(temperature, "logits", logits)
    columns = checks.vocab_size(vocab_size, logits.shape[-1])
    backend = resolve(backend, logits, "logits")
    is_tensor = isinstance(temperature, Tensor)
    options = (
        labels,
        1.0 if is_tensor else float(temperature),
        temperature if is_tensor else None,
        mask,
        columns,
        return_entropy,
        backend,
        validate,
    )
    if inplace_backward:
        if torch.compiler.is_compiling():
            raise ValueError("inplace_backward: expected False under torch.compile, got True")
        logprobs, entropy = _InplaceBackward.apply(logits, *options)  # type: ignore[misc]
    else:
        logprobs, entropy, _, _ = torch.ops.xrpo_fast.token_logprobs(logits, *options)
    return TokenLogprobs(logprobs, entropy if return_entropy else None)


def _check_logits(logits: Tensor) -> None:
    checks.dtype("logits", logits, checks.FLOATS)
    if logits.ndim < 2:
        raise ValueError(f"logits: expected shape (T, V) or (B, L, V), got {tuple(logits.shape)}")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits: expected at least one column, got {tuple(logits.shape)}")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(
            f"logits: expected stride(-1) == 1, got {logits.stride(-1)}; call .contiguous()"
        )


def row_blocks(rows: Tensor) -> list[Tensor]:
    """(..., V) as views (n, V), in order, nothing copied: one, where one row stride describes all."""
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


class _InplaceBackward(torch.autograd.Function):
    """`token_logprobs` whose gradient takes the memory of the logits."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = torch.ops.xrpo_fast.token_logprobs(*inputs)
        _save(ctx, inputs, output)
        return output[0], output[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        arguments = _gradient(ctx, *grads)
        logits = arguments[2].detach()
        _backward_into(logits, *arguments[:2], logits, *arguments[3:])
        torch.autograd.graph.increment_version(ctx.saved_tensors[0])
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

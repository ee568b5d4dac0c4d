"""Log-probs (and entropies) of given tokens from logits, without a copy of the logits.

Legend: T scored tokens (rows), V vocabulary, B, L batch and padded length.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from xrpo_fast.ops import checks
from xrpo_fast.ops.backends import resolve
from xrpo_fast.ops.logprobs_op import InplaceBackward


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
        logits:      (T, V) or (B, L, V) float32, bfloat16, float16 (float64 on cpp and torch); any
                     row strides, stride(-1) == 1. Never copied, never changed.
        labels:      logits.shape[:-1], int32 or int64.
        temperature: > 0: a float (a constant under torch.compile), or a float32 tensor, 0-d or one
                     per row (never recompiles). It has no gradient.
        mask:        logits.shape[:-1] bool, True = scored. An unscored row is never read: logprob,
                     entropy and gradient are 0, whatever its logits and label.
        vocab_size:  columns from here on are padding: ignored, gradient 0. Default V.
        inplace_backward: write the gradient over the logits (eager mode only).
        backend:     "auto" (triton for CUDA, cpp for CPU), "triton", "cpp" or "torch".
        validate:    check tensor values on CUDA too, which costs a sync.
    Returns:
        TokenLogprobs: logprobs and entropy (None unless return_entropy), both differentiable.
    Raises:
        ValueError, TypeError: wrong dtype, shape, stride, device, temperature; a backend that
        cannot run.
    Notes:
        A scored row with a label outside 0..vocab_size-1 gives NaN and no gradient. The result of a
        row does not depend, to the bit, on other rows. Extra memory: 20 bytes per row.
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
        logprobs, entropy = InplaceBackward.apply(logits, *options)  # type: ignore[misc]
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

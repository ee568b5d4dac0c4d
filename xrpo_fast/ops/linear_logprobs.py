"""Log-probs of given tokens from hidden states and the LM head; the logits never exist in full.

Legend: T tokens (rows), V vocabulary, D model width.
"""

import torch
from torch import Tensor

from xrpo_fast.ops import (
    checks,
    linear_logprobs_op,  # noqa: F401  registers the op
)
from xrpo_fast.ops.backends import resolve
from xrpo_fast.ops.logprobs import TokenLogprobs


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    active_rows: Tensor | None = None,
    vocab_size: int | None = None,
    return_entropy: bool = False,
    chunk_bytes: int = 512 << 20,
    backend: str = "auto",
    validate: bool = False,
) -> TokenLogprobs:
    """`token_logprobs(hidden @ weight.T + bias, labels)` in bounded memory.

    Args:
        hidden:      (..., D) float32, bfloat16, float16 (float64 on cpp and torch).
        weight:      (V, D), the dtype of hidden.
        labels:      hidden.shape[:-1], int32 or int64.
        bias:        (V,), the dtype of hidden.
        temperature, mask, vocab_size, return_entropy: as in token_logprobs.
        active_rows: (n,) int64, distinct indices into the flattened rows: only these are computed,
                     the others are as if masked. It saves the work without a sync.
        chunk_bytes: > 0, upper bound of the float32 logits that exist at a time (at least one row).
    Returns:
        TokenLogprobs, differentiable in hidden, weight and bias. Gradients accumulate in float32.
    Raises:
        ValueError, TypeError: wrong dtype, shape, device, temperature; a backend that cannot run.
    Notes:
        Masked rows are left out of the GEMM on the CPU; on CUDA that would need a sync, so pass
        active_rows there. Not bitwise: the GEMM library chooses its kernel by shape.
    """
    _check_inputs(hidden, weight, bias)
    checks.like_rows("labels", labels, checks.INDICES, "hidden", hidden)
    if mask is not None:
        checks.like_rows("mask", mask, (torch.bool,), "hidden", hidden)
    if active_rows is not None:
        checks.dtype("active_rows", active_rows, (torch.int64,))
        if active_rows.ndim != 1:
            raise ValueError(f"active_rows: expected shape (n,), got {tuple(active_rows.shape)}")
        checks.same_device("active_rows", active_rows, "hidden", hidden)
    checks.temperature(temperature, "hidden", hidden)
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes: expected > 0, got {chunk_bytes}")
    is_tensor = isinstance(temperature, Tensor)
    logprobs, entropy, _, _ = torch.ops.xrpo_fast.linear_token_logprobs(
        hidden,
        weight,
        bias,
        labels,
        1.0 if is_tensor else float(temperature),
        temperature if is_tensor else None,
        mask,
        active_rows,
        checks.vocab_size(vocab_size, weight.shape[0]),
        return_entropy,
        chunk_bytes,
        resolve(backend, hidden, "hidden"),
        validate,
    )
    return TokenLogprobs(logprobs, entropy if return_entropy else None)


def _check_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    checks.dtype("hidden", hidden, checks.FLOATS)
    if hidden.ndim < 2:
        raise ValueError(f"hidden: expected shape (..., D), got {tuple(hidden.shape)}")
    checks.dtype("weight", weight, (hidden.dtype,))
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"weight: expected shape (V, D) with D = {hidden.shape[-1]}, got {tuple(weight.shape)}"
        )
    checks.same_device("weight", weight, "hidden", hidden)
    if bias is not None:
        checks.dtype("bias", bias, (hidden.dtype,))
        checks.shape("bias", bias, weight.shape[:1], "(V,)")
        checks.same_device("bias", bias, "hidden", hidden)

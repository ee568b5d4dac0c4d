"""Log-prob of each packed sequence. Legend: T packed tokens, S sequences."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xrpo_fast.ops import checks
from xrpo_fast.ops.backends import LIBRARY, launcher, resolve


class SequenceLogprobs(NamedTuple):
    """What `sequence_logprobs` returns."""

    scores: Tensor
    """(S,) float32 (float64 for float64), nats; differentiable; 0 for a sequence of no tokens."""
    lengths: Tensor
    """(S,) int64, tokens."""


def sequence_logprobs(
    token_logprobs: Tensor,
    cu_seqlens: Tensor,
    *,
    normalize: str = "mean",
    backend: str = "auto",
    validate: bool = False,
) -> SequenceLogprobs:
    """Mean (or sum) of the token log-probs of each sequence.

    Args:
        token_logprobs: (T,) float32, bfloat16, float16 or float64, nats; packed.
        cu_seqlens:     (S+1,) int32 or int64: sequence s holds tokens from cu_seqlens[s] up to
                        cu_seqlens[s+1].
        normalize:      "mean" (per token) or "sum".
    Returns:
        SequenceLogprobs: scores and lengths. Sums are taken in float64.
    Raises:
        ValueError, TypeError: wrong dtype, shape, device; cu_seqlens that does not start at 0,
        decreases, or does not end at T (on CUDA only with validate=True).
    """
    checks.dtype("token_logprobs", token_logprobs, checks.FLOATS)
    if token_logprobs.ndim != 1:
        raise ValueError(f"token_logprobs: expected shape (T,), got {tuple(token_logprobs.shape)}")
    check_offsets("cu_seqlens", cu_seqlens, "token_logprobs", token_logprobs)
    checks.choice("normalize", normalize, ("mean", "sum"))
    backend = resolve(backend, token_logprobs, "token_logprobs")
    scores, lengths = torch.ops.xrpo_fast.sequence_logprobs(
        token_logprobs, cu_seqlens, normalize, backend, validate
    )
    return SequenceLogprobs(scores, lengths)


def check_offsets(argument: str, offsets: Tensor, other: str, reference: Tensor) -> None:
    """Shape, dtype and device of a cu_* argument."""
    checks.dtype(argument, offsets, checks.INDICES)
    if offsets.ndim != 1 or offsets.shape[0] == 0:
        raise ValueError(f"{argument}: expected shape (n + 1,), got {tuple(offsets.shape)}")
    checks.same_device(argument, offsets, other, reference)


def _forward(
    token_logprobs: Tensor, cu_seqlens: Tensor, normalize: str, backend: str, validate: bool
) -> tuple[Tensor, Tensor]:
    if validate or cu_seqlens.device.type == "cpu":
        checks.cumulative("cu_seqlens", cu_seqlens, token_logprobs.numel(), "tokens")
    launch = launcher(backend, "advantages", "sequence_logprobs_fwd")
    return launch(token_logprobs.contiguous(), cu_seqlens.contiguous(), normalize)


def _forward_fake(
    token_logprobs: Tensor, cu_seqlens: Tensor, normalize: str, backend: str, validate: bool
) -> tuple[Tensor, Tensor]:
    num_seqs = cu_seqlens.shape[0] - 1
    dtype = torch.float64 if token_logprobs.dtype == torch.float64 else torch.float32
    return (
        token_logprobs.new_empty((num_seqs,), dtype=dtype),
        token_logprobs.new_empty((num_seqs,), dtype=torch.int64),
    )


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    token_logprobs, cu_seqlens, normalize, _, _ = inputs
    lengths = output[1]
    ctx.mark_non_differentiable(lengths)
    ctx.save_for_backward(cu_seqlens, lengths)
    ctx.constants = (token_logprobs.shape[0], token_logprobs.dtype, normalize)


def _autograd(ctx: Any, dscores: Tensor, _: Any) -> tuple[Tensor, None, None, None, None]:
    """Every token of a sequence has the sequence's gradient, over its length for "mean"."""
    cu_seqlens, lengths = ctx.saved_tensors
    num_tokens, dtype, normalize = ctx.constants
    if normalize == "mean":
        dscores = dscores / lengths.clamp(min=1)
    places = torch.arange(num_tokens, device=lengths.device)
    segment = torch.searchsorted(cu_seqlens[1:].long().contiguous(), places, right=True)
    return dscores[segment].to(dtype), None, None, None, None


LIBRARY.define(
    "sequence_logprobs(Tensor token_logprobs, Tensor cu_seqlens, str normalize, str backend, "
    "bool validate) -> (Tensor, Tensor)"
)
LIBRARY.impl("sequence_logprobs", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("xrpo_fast::sequence_logprobs", _forward_fake, lib=LIBRARY)
torch.library.register_autograd(
    "xrpo_fast::sequence_logprobs", _autograd, setup_context=_save, lib=LIBRARY
)

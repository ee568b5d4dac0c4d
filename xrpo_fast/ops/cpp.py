"""The C++ launchers: tensors of the CPU in, tensors out. Meaning: `xrpo_fast.kernels.reference`."""

from typing import Any

import torch
from torch import Tensor

try:
    from xrpo_fast import _native
except ImportError as error:
    raise ImportError(
        "backend: expected the C++ extension xrpo_fast._native, got none; build it with "
        '`pip install -e .`, or pass backend="torch"'
    ) from error

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_SCALES = {"group": 0, "batch": 1, "none": 2}


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stat_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(
    logits: Tensor, labels: Tensor, temperature: float | Tensor, mask: Tensor | None, columns: int
) -> tuple[Any, ...]:
    is_tensor = isinstance(temperature, Tensor)
    return (
        logits.data_ptr(),
        _DTYPES[logits.dtype],
        logits.stride(0),
        *logits.shape,
        columns,
        labels.data_ptr(),
        labels.dtype == torch.int64,
        1.0 if is_tensor else temperature,
        temperature.data_ptr() if is_tensor else 0,
        1 if is_tensor and temperature.numel() > 1 else 0,
        _address(mask),
        torch.get_num_threads(),
    )


def token_logprobs_fwd(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    vocab_size: int,
    return_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = _stat_dtype(logits.dtype)
    num_rows = logits.shape[0]
    logprobs = torch.empty(num_rows, dtype=dtype)
    entropy = torch.empty(num_rows if return_entropy else 0, dtype=dtype)
    row_max = torch.empty(num_rows, dtype=dtype)
    row_sum = torch.empty(num_rows, dtype=torch.float64)
    _native.token_logprobs_fwd(
        _rows(logits, labels, temperature, mask, vocab_size),
        logprobs.data_ptr(),
        entropy.data_ptr() if return_entropy else 0,
        row_max.data_ptr(),
        row_sum.data_ptr(),
    )
    return logprobs, entropy, row_max, row_sum


def token_logprobs_bwd(
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    vocab_size: int,
    row_max: Tensor,
    row_sum: Tensor,
    entropy: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype)
    _native.token_logprobs_bwd(
        _rows(logits, labels, temperature, mask, vocab_size),
        dlogprobs.data_ptr(),
        _address(dentropy),
        row_max.data_ptr(),
        row_sum.data_ptr(),
        _address(entropy),
        out.data_ptr(),
        out.stride(0),
    )
    return out


def sequence_logprobs_fwd(
    token_logprobs: Tensor, cu_seqlens: Tensor, normalize: str
) -> tuple[Tensor, Tensor]:
    num_seqs = cu_seqlens.shape[0] - 1
    scores = torch.empty(num_seqs, dtype=_stat_dtype(token_logprobs.dtype))
    lengths = torch.empty(num_seqs, dtype=torch.int64)
    _native.sequence_logprobs_fwd(
        token_logprobs.data_ptr(),
        _DTYPES[token_logprobs.dtype],
        cu_seqlens.data_ptr(),
        cu_seqlens.dtype == torch.int64,
        num_seqs,
        normalize == "mean",
        scores.data_ptr(),
        lengths.data_ptr(),
        torch.get_num_threads(),
    )
    return scores, lengths


def xrpo_advantages_fwd(
    rewards: Tensor,
    scores: Tensor | None,
    token_logprobs: Tensor | None,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    cu_groups: Tensor,
    correct: Tensor | None,
    full_reward: float,
    exclude: Tensor | None,
    novelty_weight: float,
    novelty_clip: float,
    scale: str,
    ddof: int,
    eps: float,
) -> tuple[Tensor, ...]:
    results = tuple(torch.empty_like(rewards) for _ in range(7))
    _native.xrpo_advantages_fwd(
        rewards.data_ptr(),
        rewards.dtype == torch.float64,
        rewards.shape[0],
        cu_groups.data_ptr(),
        cu_groups.dtype == torch.int64,
        cu_groups.shape[0] - 1,
        _address(scores),
        0 if scores is None else _DTYPES[scores.dtype],
        _address(token_logprobs),
        0 if token_logprobs is None else _DTYPES[token_logprobs.dtype],
        _address(cu_seqlens),
        cu_seqlens is not None and cu_seqlens.dtype == torch.int64,
        _address(token_mask),
        0 if token_mask is None else token_mask.shape[1],
        _address(correct),
        full_reward,
        _address(exclude),
        novelty_weight,
        novelty_clip,
        _SCALES[scale],
        ddof,
        eps,
        torch.get_num_threads(),
        *(result.data_ptr() for result in results),
    )
    return results

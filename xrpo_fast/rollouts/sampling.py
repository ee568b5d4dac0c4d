"""Random numbers of a request and the tokens that they choose.

Legend: S rows, V vocabulary, N tokens.
"""

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def request_uniforms(seeds: list[int], first: int, count: int) -> np.ndarray:
    """Uniform numbers of tokens first..first+count-1 of each request.

        u[t, s] = (top 32 bits of mix(mix(seed_s) + (t + 1) golden) + 1/2) / 2^32

    A counter-based generator: u depends on the seed and the token's index only, whatever else is
    in the batch, and no state is kept.

    Args:
        seeds: S integers of any size and sign, taken modulo 2^64.
        first: index of the first token.
        count: number of tokens.
    Returns:
        (count, S) float64 in the open interval (0, 1).
    """
    state = _mix(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))
    counter = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(state[None, :] + counter[:, None]) >> np.uint64(32)
    return (bits.astype(np.float64) + 0.5) * 2.0**-32


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inversion of the distribution function, and its log-probability.

        token_s = min { v : sum_{w <= v} p_sw > u_s sum_w p_sw },  p = softmax(logits / temperature)

    Args:
        logits: (S, V), any float dtype.
        uniforms: (S,) float64 in (0, 1).
        temperature: > 0.
    Returns:
        tokens (S,) int64 and their log p (S,) float32, nats. Never a token of probability 0.
    Notes:
        The sum runs in float64, so that the tail of a large vocabulary keeps its mass.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    probs = logits.softmax(-1)
    mass = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(mass, uniforms[:, None] * mass[:, -1:], right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], probs.gather(-1, tokens)[:, 0].log()

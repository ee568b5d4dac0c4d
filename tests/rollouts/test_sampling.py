import numpy as np
import pytest
import torch

from xrpo_fast.rollouts.sampling import request_uniforms, sample_tokens

MASK64 = (1 << 64) - 1


def splitmix_finaliser(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 12345, -7, 2**80 + 3])
def test_uniforms_equal_the_formula_in_plain_integers(seed):
    state = splitmix_finaliser(seed & MASK64)
    expected = [
        ((splitmix_finaliser((state + (t + 1) * 0x9E3779B97F4A7C15) & MASK64) >> 32) + 0.5) / 2**32
        for t in range(3, 9)
    ]
    assert request_uniforms([seed], 3, 6)[:, 0].tolist() == expected


def test_uniforms_do_not_depend_on_batch_or_block():
    whole = request_uniforms([4, 5, 6], 0, 100)
    pieces = [request_uniforms([6], 0, 37), request_uniforms([6], 37, 63)]
    assert np.array_equal(whole[:, 2], np.concatenate(pieces)[:, 0])


def test_uniforms_of_neighbouring_seeds_and_tokens_are_uncorrelated():
    u = request_uniforms(list(range(400)), 0, 400)
    assert u.min() > 0
    assert u.max() < 1
    # Standard errors over 160,000 numbers: mean 7e-4, correlations 2.5e-3.
    assert abs(u.mean() - 0.5) < 3e-3
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 1e-2
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 1e-2
    assert len(np.unique(u)) > 0.9999 * u.size


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_follow_the_tempered_distribution(temperature):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0))
    num_draws = 200_000
    uniforms = torch.from_numpy(request_uniforms(list(range(num_draws)), 0, 1)[0])
    tokens, logprobs = sample_tokens(logits.expand(num_draws, -1), uniforms, temperature)
    probs = (logits.double() / temperature).softmax(-1)
    counts = torch.bincount(tokens, minlength=12)
    chi_square = ((counts - num_draws * probs) ** 2 / (num_draws * probs)).sum().item()
    assert chi_square < 31.3  # 99.9 % point of 11 degrees of freedom
    assert (logprobs - probs.log()[tokens]).abs().max() < 1e-6


def test_impossible_tokens_are_never_sampled():
    logits = torch.full((4, 1000), -torch.inf)
    logits[:, 500] = 0.0
    logits[:, 501] = 0.0
    edge = 0.5 * 2.0**-32
    uniforms = torch.tensor([edge, 0.499, 0.501, 1 - edge], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniforms, 1.0)
    assert tokens.tolist() == [500, 500, 501, 501]
    assert torch.allclose(logprobs, torch.full((4,), 0.5).log())


def test_bf16_logits_are_summed_in_float():
    logits = torch.zeros(1, 151_936, dtype=torch.bfloat16)
    for u in (1e-7, 0.25, 0.9999999):
        tokens, logprobs = sample_tokens(logits, torch.tensor([u], dtype=torch.float64), 1.0)
        assert abs(tokens.item() - u * 151_936) <= 1
        assert abs(logprobs.item() + np.log(151_936)) < 1e-5

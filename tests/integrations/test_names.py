"""The names of verl and OpenRLHF: same values, logits left alone where they promise it."""

import pytest
import torch

from xrpo_fast.integrations.openrlhf import log_probs_from_logits
from xrpo_fast.integrations.verl import logprobs_from_logits


def truth(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = logits.double() / temperature
    return scaled.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_openrlhf_never_changes_the_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 50).to(dtype)
    before, labels = logits.clone(), torch.randint(50, (3, 4))
    result = log_probs_from_logits(logits, labels, temperature=0.5)
    torch.testing.assert_close(result.double(), truth(logits, labels, 0.5), atol=1e-5, rtol=0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "copy"])
def test_verl_gradient(inplace: bool) -> None:
    torch.manual_seed(0)
    leaf = torch.randn(6, 40, requires_grad=True)
    labels = torch.randint(40, (6,))
    result = logprobs_from_logits(leaf * 1.0, labels, inplace_backward=inplace)
    result.sum().backward()
    expected = torch.nn.functional.one_hot(labels, 40) - leaf.detach().softmax(-1)
    torch.testing.assert_close(leaf.grad, expected, atol=1e-6, rtol=0)


def test_verl_without_gradient_takes_its_default_arguments() -> None:
    logits, labels = torch.randn(2, 3, 9), torch.zeros(2, 3, dtype=torch.int64)
    torch.testing.assert_close(
        logprobs_from_logits(logits, labels).double(), truth(logits, labels, 1.0), atol=1e-6, rtol=0
    )

"""The fused ops under verl's names.

from xrpo_fast.integrations.verl import logprobs_from_logits
"""

from torch import Tensor

from xrpo_fast.ops import token_logprobs


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probs of the labels: verl.utils.torch_functional.logprobs_from_logits in one fused pass.

    Args:
        logits: (..., V).
        labels: (...) int64.
        inplace_backward: write the gradient over the logits, as verl does by default; nothing else
            may need them then (an entropy of the same logits does).
    Returns:
        (...) float32, nats.
    """
    needs_gradient = logits.requires_grad
    return token_logprobs(
        logits, labels, inplace_backward=inplace_backward and needs_gradient
    ).logprobs

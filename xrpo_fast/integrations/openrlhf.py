"""The fused ops under OpenRLHF's names.

from xrpo_fast.integrations.openrlhf import log_probs_from_logits
"""

from torch import Tensor

from xrpo_fast.ops import token_logprobs


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs of the labels: openrlhf.models.utils.log_probs_from_logits in one fused pass.

    The logits are never changed; OpenRLHF's own divides them by the temperature in place, so that
    an entropy computed from them afterwards is that of other logits.

    Args:
        logits: (..., V).
        labels: (...) int64.
    Returns:
        (...) float32, nats.
    """
    return token_logprobs(logits, labels, temperature=temperature).logprobs

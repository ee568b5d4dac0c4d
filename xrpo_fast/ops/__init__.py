"""The fused ops: log-probs of sampled tokens and XRPO advantages, for any GRPO codebase.

    from xrpo_fast.ops import token_logprobs, xrpo_advantages

Triton runs CUDA tensors, C++ runs CPU tensors, and plain PyTorch runs anything with
backend="torch"; all three mean the same. Each op works under autograd and torch.compile.
"""

from xrpo_fast.ops.advantages import (
    GroupAdvantages,
    XrpoAdvantages,
    group_advantages,
    xrpo_advantages,
)
from xrpo_fast.ops.backends import last_backend
from xrpo_fast.ops.linear_logprobs import linear_token_logprobs
from xrpo_fast.ops.logprobs import TokenLogprobs, token_logprobs
from xrpo_fast.ops.sequences import SequenceLogprobs, sequence_logprobs

__all__ = [
    "GroupAdvantages",
    "SequenceLogprobs",
    "TokenLogprobs",
    "XrpoAdvantages",
    "group_advantages",
    "last_backend",
    "linear_token_logprobs",
    "sequence_logprobs",
    "token_logprobs",
    "xrpo_advantages",
]

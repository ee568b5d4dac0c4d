"""XRPO (arXiv 2510.06672): planned rollouts, in-context seeding and novelty advantages for GRPO.

Importing this package costs no torch, triton, transformers or vllm: public names load on first use.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "RolloutPlanner": "xrpo_fast.planner",
    "student_t_quantile": "xrpo_fast.planner",
    "token_logprobs": "xrpo_fast.ops",
    "linear_token_logprobs": "xrpo_fast.ops",
    "sequence_logprobs": "xrpo_fast.ops",
    "group_advantages": "xrpo_fast.ops",
    "xrpo_advantages": "xrpo_fast.ops",
}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'xrpo_fast' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__

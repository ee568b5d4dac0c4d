"""Verified rewards: math, code, exact match and user functions, in worker processes.

Public names load on first use: the worker processes import this package and need no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "make_verifier": "verifier",
    "Verifier": "verifier",
    "RewardContractError": "functions",
    "answer_checker": "functions",
}
__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'xrpo_fast.rewards' has no attribute {name!r}")
    return getattr(import_module(f"xrpo_fast.rewards.{_HOME[name]}"), name)

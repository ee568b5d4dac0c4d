"""What may be skipped, and how CI forbids it.

A test that needs something optional asks `require("vllm")`. Without it the test is skipped, unless
XRPO_REQUIRE lists the name (XRPO_REQUIRE=triton,vllm): then the test fails instead.
"""

import importlib
import os
from collections.abc import Callable

import pytest


def _missing_triton() -> str | None:
    import torch

    if reason := _missing_module("triton"):
        return reason
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "triton needs a GPU, or TRITON_INTERPRET=1"


def _missing_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _missing_bubblewrap() -> str | None:
    from xrpo_fast.rewards.sandbox import Sandbox

    is_there = Sandbox().is_isolated
    return None if is_there else "bubblewrap is not installed, or does not work here"


def _missing_module(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"{name} cannot be imported: {error}"
    return None


PROBES: dict[str, Callable[[], str | None]] = {
    "triton": _missing_triton,
    # Compiling for a GPU needs none.
    "triton_compiler": lambda: _missing_module("triton"),
    "gpu": _missing_gpu,
    "bubblewrap": _missing_bubblewrap,
}


@pytest.fixture(scope="session")
def require() -> Callable[[str], None]:
    """require(name): skip, or fail, where `name` (of PROBES, or a module) is missing."""

    def check(name: str) -> None:
        reason = PROBES[name]() if name in PROBES else _missing_module(name)
        if reason is None:
            return
        if name in os.environ.get("XRPO_REQUIRE", "").split(","):
            pytest.fail(f"XRPO_REQUIRE={name}, but {reason}", pytrace=False)
        pytest.skip(reason)

    return check

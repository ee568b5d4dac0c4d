"""Shared by all tests: what may be skipped, and how CI forbids it.

A test that needs something optional asks `require("triton")`. Without it the test is skipped, unless
XRPO_REQUIRE lists the name (XRPO_REQUIRE=triton,vllm): then the test fails instead.
"""

import importlib
import os
from collections.abc import Callable

import pytest


def _missing_triton() -> str | None:
    import torch

    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "triton needs a GPU, or TRITON_INTERPRET=1"


def _missing_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _missing_module(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"{name} cannot be imported: {error}"
    return None


@pytest.fixture(scope="session")
def require() -> Callable[[str], None]:
    """require(name): go on where `name` ("triton", "gpu", or a module) is there, else skip or fail."""

    def check(name: str) -> None:
        probes = {"triton": _missing_triton, "gpu": _missing_gpu}
        reason = probes[name]() if name in probes else _missing_module(name)
        if reason is None:
            return
        if name in os.environ.get("XRPO_REQUIRE", "").split(","):
            pytest.fail(f"XRPO_REQUIRE={name}, but {reason}", pytrace=False)
        pytest.skip(reason)

    return check

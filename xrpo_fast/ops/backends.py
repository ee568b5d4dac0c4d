"""Which implementation runs: chosen once, in `resolve`, never changed behind the caller's back."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "cpp", "torch")

LIBRARY = torch.library.Library("xrpo_fast", "DEF")
"""All private ops; `torch.ops.xrpo_fast`."""

_AUTO = {"cpu": "cpp", "cuda": "triton"}
_MODULES = {
    ("torch", "logprobs"): "xrpo_fast.kernels.reference",
    ("torch", "advantages"): "xrpo_fast.kernels.reference",
    ("cpp", "logprobs"): "xrpo_fast.ops.cpp",
    ("cpp", "advantages"): "xrpo_fast.ops.cpp",
    ("triton", "logprobs"): "xrpo_fast.kernels.logprobs",
    ("triton", "advantages"): "xrpo_fast.kernels.advantages",
}
_launchers: dict[tuple[str, str, str], Callable[..., Any]] = {}
_last_backend: str | None = None


def last_backend() -> str | None:
    """What ran the last op of this process: "triton", "cpp" or "torch"; None before the first."""
    return _last_backend


def resolve(backend: str, tensor: Tensor, argument: str) -> str:
    """The implementation for `tensor`; raises where the one asked for cannot run, and says why."""
    device = tensor.device.type
    if backend == "auto":
        if device not in _AUTO:
            raise ValueError(
                f'{argument}: expected a cpu or cuda tensor, got {device}; pass backend="torch"'
            )
        backend = _AUTO[device]
    if backend == "cpp" and device != "cpu":
        raise ValueError(f'backend: expected one that runs on {device}, got "cpp"; use "auto"')
    if backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            'backend: expected one that runs on cpu, got "triton"; move the tensors to a GPU, '
            "or set TRITON_INTERPRET=1 before the first import to test the kernels"
        )
    if backend == "triton" and tensor.dtype == torch.float64 and argument != "rewards":
        raise TypeError(
            f"{argument}: expected bfloat16, float16 or float32 for backend triton, got float64; "
            'pass backend="torch"'
        )
    if backend not in BACKENDS:
        raise ValueError(f'backend: expected one of {", ".join(BACKENDS)}, got "{backend}"')
    return backend


def launcher(backend: str, family: str, name: str) -> Callable[..., Any]:
    """The launcher `name` of a resolved backend; from here on `last_backend` names it."""
    global _last_backend
    key = (backend, family, name)
    found = _launchers.get(key)
    if found is None:
        module = importlib.import_module(_MODULES[backend, family])
        found = _launchers[key] = getattr(module, name)
    _last_backend = backend
    return found

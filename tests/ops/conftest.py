"""Every op test runs on three backends: torch, cpp, and triton (a GPU, or TRITON_INTERPRET=1).

The interpreter is slow, so shapes marked `large` are left out there; what needs float64 is left out
on triton, which has no float64 kernels.
"""

import os

import pytest
import torch

BACKENDS = ("torch", "cpp", "triton")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large: too large for the Triton interpreter")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, require) -> str:
    if request.param == "triton":
        require("triton")
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if is_interpreted and request.node.get_closest_marker("large"):
            pytest.skip("large: minutes in the interpreter")
    return request.param


@pytest.fixture
def device(backend: str) -> str:
    is_gpu = backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1"
    return "cuda" if is_gpu else "cpu"


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN (or the largest integer): what a kernel forgets to write shows up."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(allocate):
    def filled(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 0 and type(tensor) is torch.Tensor:
            if tensor.dtype.is_floating_point:
                tensor.fill_(float("nan"))
            elif tensor.dtype in (torch.int32, torch.int64):
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return filled

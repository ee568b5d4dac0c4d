"""Shared by all tests: what may be skipped, and how CI forbids it.

A test that needs something optional asks `require("triton")`. Without it the test is skipped,
unless XRPO_REQUIRE lists the name (XRPO_REQUIRE=triton,vllm): then the test fails instead.
"""

import importlib
import os
from collections.abc import Callable

import numpy as np
import pytest

from xrpo_fast.types import Completion, Prompt, Request, Rollout, Verdict


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
    """require(name): skip, or fail, where `name` ("triton", "gpu", or a module) is missing."""

    def check(name: str) -> None:
        probes = {"triton": _missing_triton, "gpu": _missing_gpu}
        reason = probes[name]() if name in probes else _missing_module(name)
        if reason is None:
            return
        if name in os.environ.get("XRPO_REQUIRE", "").split(","):
            pytest.fail(f"XRPO_REQUIRE={name}, but {reason}", pytrace=False)
        pytest.skip(reason)

    return check


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., Rollout]:
    """make_rollout(group, reward, ...): a rollout of given numbers, without an engine."""

    def make(
        group: int = 0,
        reward: float = 0.0,
        *,
        token_ids: tuple[int, ...] = (7, 8, 9),
        logprobs: list[float] | None = None,
        sample_index: int = 0,
        finish_reason: str = "stop",
        is_seeded: bool = False,
        round_index: int = 0,
        tier: str = "",
        **verdict: object,
    ) -> Rollout:
        prompt = Prompt(
            id=f"p{group}",
            index=group,
            question=f"question {group}",
            token_ids=(1, 2, 3 + group),
            answer=None,
            tier=tier,
        )
        request = Request(
            id=1000 * group + sample_index,
            group=group,
            sample_index=sample_index,
            prompt_ids=(4, 5, *prompt.token_ids) if is_seeded else prompt.token_ids,
            seed=0,
            max_tokens=64,
            is_seeded=is_seeded,
        )
        values = [-1.0] * len(token_ids) if logprobs is None else logprobs
        completion = Completion(
            request=request,
            token_ids=token_ids,
            logprobs=np.array(values, dtype=np.float32),
            finish_reason=finish_reason,  # pyright: ignore[reportArgumentType]
        )
        fields = {"solved": reward >= 1.0, "parts": {"exact": reward}, **verdict}
        return Rollout(
            prompt=prompt,
            completion=completion,
            verdict=Verdict(reward=reward, **fields),  # pyright: ignore[reportArgumentType]
            round_index=round_index,
        )

    return make

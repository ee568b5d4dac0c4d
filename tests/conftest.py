"""Shared by all tests: requirements, and rollouts of given numbers."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.requirements import require
from xrpo_fast.types import Completion, Prompt, Request, Rollout, Verdict

__all__ = ["require"]


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
            text=" ".join(map(str, token_ids)),
            verdict=Verdict(reward=reward, **fields),  # pyright: ignore[reportArgumentType]
            round_index=round_index,
        )

    return make

"""torch.library op behind `group_advantages` and `xrpo_advantages`; it has no derivative."""

from typing import Any

import torch
from torch import Tensor

from xrpo_fast.ops import checks
from xrpo_fast.ops.backends import LIBRARY, launcher


def launch(rewards: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The op, past the dispatcher where nobody watches: half of the time of a small call."""
    if type(rewards) is Tensor and not torch.compiler.is_compiling():
        return _forward(rewards, *arguments)
    return torch.ops.xrpo_fast.xrpo_advantages(rewards, *arguments)


def _forward(
    rewards: Tensor,
    scores: Tensor | None,
    token_logprobs: Tensor | None,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    cu_groups: Tensor,
    correct: Tensor | None,
    full_reward: float,
    exclude: Tensor | None,
    novelty_weight: float,
    novelty_clip: float,
    scale: str,
    ddof: int,
    eps: float,
    backend: str,
    validate: bool,
) -> tuple[Tensor, ...]:
    if validate or rewards.device.type == "cpu":
        checks.cumulative("cu_groups", cu_groups, rewards.shape[0], "rows")
        if cu_seqlens is not None:
            assert token_logprobs is not None
            checks.cumulative("cu_seqlens", cu_seqlens, token_logprobs.shape[0], "tokens")
    run = launcher(backend, "advantages", "xrpo_advantages_fwd")
    scores, token_logprobs, cu_seqlens, token_mask, correct, exclude = (
        None if x is None else x.contiguous()
        for x in (scores, token_logprobs, cu_seqlens, token_mask, correct, exclude)
    )
    return run(
        rewards.contiguous(), scores, token_logprobs, cu_seqlens, token_mask,
        cu_groups.contiguous(), correct, full_reward, exclude, novelty_weight, novelty_clip,
        scale, ddof, eps,
    )  # fmt: skip


def _forward_fake(rewards: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(rewards.new_empty(rewards.shape) for _ in range(7))


LIBRARY.define(
    "xrpo_advantages(Tensor rewards, Tensor? scores, Tensor? token_logprobs, Tensor? cu_seqlens, "
    "Tensor? token_mask, Tensor cu_groups, Tensor? correct, float full_reward, Tensor? exclude, "
    "float novelty_weight, float novelty_clip, str scale, int ddof, float eps, str backend, "
    "bool validate) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl("xrpo_advantages", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("xrpo_fast::xrpo_advantages", _forward_fake, lib=LIBRARY)

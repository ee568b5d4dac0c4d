"""Types of the compiled extension, csrc/bindings.cpp. The Python faces check the arguments."""

from typing import Any

import numpy as np

# Planner; its face is xrpo_fast.planner.

def student_t_quantile(p: np.ndarray, df: np.ndarray) -> np.ndarray: ...

class RolloutPlanner:
    def __init__(
        self,
        *,
        base_rollouts: int,
        rounds: int,
        exploration: float,
        confidence: float,
        allocation: int,
        spread: int,
        clock: int,
        max_rollouts_per_prompt: int | None,
        is_relative: bool,
        use_history: bool,
    ) -> None: ...
    def begin_step(
        self,
        num_prompts: int,
        total: int,
        step: int,
        seed: int,
        ids: list[str] | None,
        a: np.ndarray,
        b: np.ndarray,
        /,
    ) -> None: ...
    def plan_round(self, allow_partial: bool, /) -> np.ndarray | None: ...
    def next_prompts(self, k: int, /) -> list[int]: ...
    def observe(
        self, prompts: np.ndarray, rewards: np.ndarray, is_seeded: np.ndarray, is_binary: bool, /
    ) -> None: ...
    def observe_one(
        self, prompt: int, reward: float, is_seeded: bool, is_binary: bool, /
    ) -> None: ...
    def base_of(self, prompt: int, /) -> int: ...
    def is_waiting(self) -> bool: ...
    def is_done(self) -> bool: ...
    def is_streaming_step(self) -> bool: ...
    def uses_rounds(self) -> bool: ...
    def priorities(self) -> np.ndarray: ...
    def counts(self) -> np.ndarray: ...
    def planned(self) -> np.ndarray: ...
    def unseeded(self) -> tuple[np.ndarray, np.ndarray]: ...
    def means(self) -> np.ndarray: ...
    def stds(self) -> np.ndarray: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, values: dict[str, Any], /) -> None: ...

# CPU kernels; their face is xrpo_fast.ops.cpp. Pointers are integers, 0 is absent.

def token_logprobs_fwd(
    rows: tuple[Any, ...], logprobs: int, entropy: int, row_max: int, row_sum: int
) -> None: ...
def token_logprobs_bwd(
    rows: tuple[Any, ...],
    dlogprobs: int,
    dentropy: int,
    row_max: int,
    row_sum: int,
    entropy: int,
    dlogits: int,
    row_stride: int,
) -> None: ...
def logprob_isa() -> str: ...
def limit_logprob_isa(limit: str) -> None: ...
def sequence_logprobs_fwd(
    token_logprobs: int,
    dtype: int,
    cu_seqlens: int,
    cu_is_int64: bool,
    num_seqs: int,
    is_mean: bool,
    scores: int,
    lengths: int,
    num_threads: int,
) -> None: ...
def xrpo_advantages_fwd(*arguments: float) -> None: ...

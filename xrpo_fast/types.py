"""The nouns that flow through a step. Every stage takes and returns these and nothing else.

    Prompt -> Request -> Completion -> Rollout -> TrainingRow -> MiniBatch -> MicroBatch

Dimensions: P prompts (groups), S sequences (rollouts), T packed tokens, V vocabulary, L padded
length.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

FinishReason = Literal["stop", "length"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One problem of the data set."""

    id: str
    """Unique in the data set and stable between runs; never shared by train and evaluation."""
    index: int
    """Position in the data set, 0..len-1."""
    question: str
    """What the user asks, as text: embedded for retrieval, shown in seeded prompts."""
    token_ids: tuple[int, ...]
    """The rendered prompt, exactly what the engine gets."""
    answer: Any
    """Gold answer, as the reward wants it."""
    messages: Any = None
    """Chat messages (list of dicts) or the text the prompt was rendered from."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the data set; handed to rewards by name."""
    tier: str = ""
    """Difficulty label, where the data has one; metrics are also given per tier."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Exemplar:
    """A verified success of the policy, shown to it again as a worked example."""

    prompt_id: str
    question: str
    response: str
    """The text that the verifier saw, cut where it is too long to show."""
    num_tokens: int
    step: int
    """Training step that produced it."""
    similarity: float = 1.0
    """Cosine to the question it was retrieved for."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Request:
    """One rollout to generate."""

    id: int
    """Unique in the life of an engine."""
    group: int
    """Position of the prompt in the step, 0..P-1."""
    sample_index: int
    """0.. within the group; with seed, step and prompt it fixes the random numbers."""
    prompt_ids: tuple[int, ...]
    """What the engine gets: the prompt, or the prompt behind worked examples."""
    seed: int
    """Of this request alone: the tokens do not depend on what else is in the batch."""
    max_tokens: int
    is_seeded: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class Completion:
    """What an engine returns for one request."""

    request: Request
    token_ids: tuple[int, ...]
    """[L] sampled ids, the EOS included when one was sampled; may be empty."""
    logprobs: np.ndarray
    """[L] float32, nats, of the sampled ids under logits / temperature."""
    finish_reason: FinishReason


@dataclass(kw_only=True, slots=True, frozen=True)
class Sampling:
    """How an engine samples; the same for all requests of a run. No top-k, top-p or penalties: a
    truncated distribution would not be the one that the trainer computes."""

    temperature: float
    eos_token_ids: frozenset[int]
    """All ids that end a response: the generation config's and the tokenizer's."""


class Engine(Protocol):
    """Rolls out requests with the current policy. Streaming engines return completions one by one;
    batch engines return a whole batch from one step()."""

    is_streaming: bool
    """True where a slot freed by a finished request can be refilled while others go on."""
    num_slots: int
    """Rollouts that run at once."""

    def submit(self, requests: Sequence[Request]) -> None: ...
    def step(self) -> list[Completion]: ...
    def free_slots(self) -> int: ...
    def num_steps(self) -> int: ...
    def load_weights(self, state_dict: Iterable[tuple[str, torch.Tensor]]) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...

    # sleep() gives the memory to the trainer; wake() and then load_weights() come before the next
    # rollouts.
    def close(self) -> None: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    """What the verifier says of one completion."""

    reward: float
    """NaN = unscored (not applicable, or the verifier failed)."""
    solved: bool
    """Reward reached full_reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Reward of each function by name, before weights."""
    error: str | None = None
    """Set when the verifier itself failed: timed out or died. Never set by a wrong answer."""
    extracted: str | None = None
    """Final answer in canonical form, where the reward extracts one; cons@k votes on it."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """A completion with its verdict."""

    prompt: Prompt
    completion: Completion
    text: str
    """The completion's tokens, decoded once: what the verifier saw."""
    verdict: Verdict
    exemplars: tuple[Exemplar, ...] = ()
    """The worked examples it saw, where it was seeded."""
    round_index: int = 0
    """Planner round that asked for it; 0 is the base."""
    finish_order: int = 0
    """Order of completion within the step."""
    ancestors: tuple[int, ...] = ()
    """Segments in front of its last one, root first, by their number in the prompt's tree; empty
    for a rollout of its own."""
    num_shared_tokens: int = 0
    """Leading tokens that were generated once, for it and for an earlier rollout of its prompt."""

    @property
    def is_seeded(self) -> bool:
        return self.completion.request.is_seeded

    @property
    def is_truncated(self) -> bool:
        return self.completion.finish_reason == "length"

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids)


@dataclass(kw_only=True, slots=True)
class TrainingRow:
    """A rollout as the loss sees it."""

    group: int
    prompt_ids: tuple[int, ...]
    """The prompt trained under: the original, or the seeded one."""
    response_ids: tuple[int, ...]
    advantage: float
    token_weight: float = 1.0
    """Row weight w of loss.group_weight."""
    sampler_logprobs: np.ndarray | None = None
    """[L] float32, nats; None where the prompt was swapped, so that no mismatch can be measured."""
    old_logprobs: np.ndarray | None = None
    """[L] float32, nats; None where the loss needs none (one update per batch)."""
    reference_logprobs: np.ndarray | None = None
    """[L] float32, nats; None without KL."""
    is_trained: bool = True
    """False: in the group's statistics and the denominators, but without gradient of its own."""
    is_shaped: bool = False
    """Weighted by p / (p + 0.1) per token without clip (icl.train_prompt = "original_shaped")."""


@dataclass(kw_only=True, slots=True)
class MiniBatch:
    """The rows of one optimizer update."""

    rows: list[TrainingRow]
    """Those that carry gradient."""
    num_rows: float
    """Sum of the row weights over all rows, those without gradient included."""
    num_tokens: float
    """Sum of row weight times length, likewise."""


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Rows of similar length, padded on the right, with their scored tokens packed: B rows."""

    input_ids: torch.Tensor
    """(B, L) int64."""
    attention_mask: torch.Tensor
    """(B, L) int64, 1 on real tokens: by length, never by id."""
    positions: torch.Tensor
    """(T,) int64 into the flattened (B L): the position whose output predicts the token."""
    labels: torch.Tensor
    """(T,) int64, the response tokens."""
    row_index: torch.Tensor
    """(T,) int64, row of each scored token."""
    lengths: torch.Tensor
    """(B,) float32, scored tokens of each row."""
    row_weights: torch.Tensor
    """(B,) float32."""
    advantages: torch.Tensor
    """(T,) float32."""
    old_logprobs: torch.Tensor | None
    """(T,) float32, nats; None where the forward itself is the old policy."""
    sampler_logprobs: torch.Tensor
    """(T,) float32, nats; NaN where the prompt was swapped and there are none."""
    reference_logprobs: torch.Tensor | None
    """(T,) float32, nats."""
    is_shaped: torch.Tensor | None
    """(T,) bool."""


RewardFunction = Callable[..., "list[float | None]"]
"""f(prompts, completions, completion_ids=None, **columns) -> list of float or None, as in TRL."""

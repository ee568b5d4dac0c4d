"""Engine on the trainer's own transformers model: no second copy of the weights, no start-up."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from xrpo_fast.rollouts.checks import check_requests, check_settings
from xrpo_fast.types import Completion, Request, Sampling

# Columns that padding may fill before a batch is cut for it: 16384 columns of a 7B model's cache
# with grouped heads are 1 GiB.
_FREE_PADDING_TOKENS = 16384


class TransformersEngine:
    """Batched sampling with a key/value cache from a causal language model.

    The tokens of a request depend on its prompt, its seed and the weights only: what else is in the
    batch changes the logits by rounding and nothing else.

    Args:
        model: the trainer's model, used in place, in whatever mode it is; dropout is off while
            tokens are generated and the mode is restored. All layers with full attention.
        sampling: temperature and the ids that end a response.
        max_slots: most rows decoded at once.
        pad_token_id: fills prompts on the left; may equal an EOS, as it is masked by position.
        compute_dtype: run under autocast to this type; None computes in the weights' type.
        max_model_len: most tokens of prompt and response; None takes the model's.
    Raises:
        ValueError: a setting out of range, or a model with sliding or linear attention.
    """

    is_streaming = False

    def __init__(
        self,
        model: Any,
        sampling: Sampling,
        *,
        max_slots: int,
        pad_token_id: int,
        compute_dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
    ) -> None:
        check_settings(sampling, max_slots)
        vocab_size = model.config.vocab_size
        if not 0 <= pad_token_id < vocab_size:
            raise ValueError(f"pad_token_id: expected 0..{vocab_size - 1}, got {pad_token_id}")
        _check_attention(model.config)
        self._model = model
        self._sampling = sampling
        self.num_slots = max_slots
        self._pad_token_id = pad_token_id
        self._compute_dtype = compute_dtype
        self._max_model_len = _model_len(model.config, max_model_len)
        self._waiting: list[Request] = []
        self._num_steps = 0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; more than max_slots are run in several batches, one per step()."""
        check_requests(
            requests,
            running=[request.id for request in self._waiting],
            max_model_len=self._max_model_len,
            vocab_size=self._model.config.vocab_size,
        )
        self._waiting.extend(requests)

    def step(self) -> list[Completion]:
        """Run one batch to its end; its completions in the order of submission, or none."""
        from xrpo_fast.rollouts.decode import DecodeBatch

        if not self._waiting:
            return []
        batch = self._next_batch()
        with torch.no_grad(), self._generating():
            decode = DecodeBatch(self._model, batch, self._sampling, self._pad_token_id)
            completions = decode.run()
        self._num_steps += decode.num_steps
        return completions

    def _next_batch(self) -> list[Request]:
        """The shortest prompts that wait, cut at max_slots or where padding outweighs them."""
        order = sorted(range(len(self._waiting)), key=lambda i: len(self._waiting[i].prompt_ids))
        taken: list[int] = []
        num_tokens = 0
        for i in order[: self.num_slots]:
            length = len(self._waiting[i].prompt_ids)
            padding = length * len(taken) - num_tokens
            if padding > max(_FREE_PADDING_TOKENS, num_tokens):
                break
            taken.append(i)
            num_tokens += length
        is_taken = set(taken)
        batch = [self._waiting[i] for i in sorted(taken)]
        self._waiting = [x for i, x in enumerate(self._waiting) if i not in is_taken]
        return batch

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Dropout off, our attention on, autocast as asked; everything as it was afterwards."""
        from xrpo_fast.rollouts.kv_cache import ATTENTION_NAME

        model, config = self._model, self._model.config
        was_training = [module for module in model.modules() if module.training]
        attention = config._attn_implementation
        model.eval()
        config._attn_implementation = ATTENTION_NAME
        device_type = model.device.type
        is_mixed = self._compute_dtype not in (None, model.dtype)
        try:
            with torch.autocast(device_type, dtype=self._compute_dtype, enabled=is_mixed):
                yield
        finally:
            config._attn_implementation = attention
            for module in was_training:
                module.training = True

    def free_slots(self) -> int:
        return max(0, self.num_slots - len(self._waiting))

    def num_steps(self) -> int:
        """Forward passes since the start."""
        return self._num_steps

    def load_weights(self, state_dict: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing to move, as the weights are the trainer's; checks that they really are.

        Raises:
            ValueError: a tensor that is not the model's own, which would leave the engine stale.
        """
        own = dict(self._model.state_dict(keep_vars=True))
        for name, tensor in state_dict:
            if name not in own:
                raise ValueError(f"state_dict: expected a weight of the model, got {name!r}")
            if tensor.data_ptr() != own[name].data_ptr() or tensor.shape != own[name].shape:
                raise ValueError(
                    f"state_dict: expected the model's own tensor for {name!r}, got another; "
                    "give the engine the model that is trained"
                )

    def sleep(self) -> None:
        """Nothing to free between batches: the cache lives within step()."""

    def wake(self) -> None:
        """Nothing to bring back."""

    def close(self) -> None:
        self._waiting.clear()


def _model_len(config: Any, max_model_len: int | None) -> int:
    limit = config.max_position_embeddings
    if max_model_len is None:
        return limit
    rope = getattr(config, "rope_parameters", None) or {}
    if max_model_len > limit and rope.get("rope_type", "default") == "default":
        raise ValueError(
            f"max_model_len: expected at most {limit}, the model's max_position_embeddings, "
            f"got {max_model_len}"
        )
    return max_model_len


def _check_attention(config: Any) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if window is not None and not hasattr(config, "layer_types"):
        layer_types = {"sliding_attention"}
    if layer_types != {"full_attention"}:
        raise ValueError(
            f"model: expected full attention in all layers, got {sorted(layer_types)}; "
            'use engine = "vllm"'
        )

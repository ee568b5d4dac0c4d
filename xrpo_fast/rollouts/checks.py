"""Checks that every engine makes on what goes in, and the error for what comes out."""

from collections.abc import Collection, Sequence

from xrpo_fast.types import Request, Sampling

_MIN_TEMPERATURE = 0.01


class EngineError(RuntimeError):
    """The engine failed while it ran; it cannot go on. Exit code 1."""


def check_settings(sampling: Sampling, max_slots: int) -> None:
    """Raises ValueError where an engine could not sample as told. Below a temperature of 0.01 vLLM
    would silently sample at 0.01, and greedy decoding has no log-probabilities to train on."""
    if max_slots < 1:
        raise ValueError(f"max_slots: expected at least 1, got {max_slots}")
    if not sampling.temperature >= _MIN_TEMPERATURE:
        raise ValueError(
            f"sampling.temperature: expected at least {_MIN_TEMPERATURE}, "
            f"got {sampling.temperature}"
        )
    if any(token < 0 for token in sampling.eos_token_ids):
        raise ValueError(
            "sampling.eos_token_ids: expected ids >= 0, "
            f"got {sorted(sampling.eos_token_ids)}; leave out an EOS that is not set"
        )


def check_requests(
    requests: Sequence[Request],
    *,
    running: Collection[int],
    max_model_len: int,
    vocab_size: int,
) -> None:
    """Raises ValueError that names the first request that no engine could run."""
    seen = set(running)
    for request in requests:
        if request.id in seen:
            raise ValueError(f"requests: expected unique ids, got {request.id} twice")
        seen.add(request.id)
        name = f"requests: request {request.id}"
        length = len(request.prompt_ids)
        if length == 0:
            raise ValueError(f"{name}: expected at least one prompt token, got none")
        if request.max_tokens < 1:
            raise ValueError(f"{name}: expected max_tokens >= 1, got {request.max_tokens}")
        if length + request.max_tokens > max_model_len:
            raise ValueError(
                f"{name}: expected prompt + max_tokens <= {max_model_len} tokens, got "
                f"{length} + {request.max_tokens}; drop the prompt at load or raise the limit"
            )
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"{name}: expected token ids in 0..{vocab_size - 1}, got {bad}")

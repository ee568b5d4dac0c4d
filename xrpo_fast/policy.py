"""The model being trained: loading, log-probs of a micro-batch, weights for the engine.

Master weights are float32 (AdamW at 1e-6 is below bfloat16's resolution); compute and hand-over may
be bfloat16. Dimensions: B rows, L padded length, T scored tokens, D width, V vocabulary.
"""

import copy
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xrpo_fast.config import ConfigError, ModelConfig
from xrpo_fast.ops import TokenLogprobs, linear_token_logprobs, token_logprobs
from xrpo_fast.types import MicroBatch

logger = logging.getLogger(__name__)

MAX_LOGITS_BYTES = 256 * 2**20
"""Logits up to this size are kept for the backward pass; larger ones are recomputed in chunks."""

BUILTIN_MODEL = "builtin:symbols"


class ModelError(ConfigError):
    """The model or its tokenizer cannot be used; the message says why. Exit code 2."""


@dataclass(kw_only=True, slots=True)
class Policy:
    """A causal language model of Hugging Face form, its tokenizer and how it is computed."""

    model: Any
    tokenizer: Any
    device: torch.device
    compute_dtype: torch.dtype
    temperature: float
    path: str
    """Folder or id that the weights came from; engines read the architecture there."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a response: the generation config's and the tokenizer's."""
        ids = self.model.generation_config.eos_token_id
        listed = [ids] if isinstance(ids, int) else list(ids or [])
        if self.tokenizer.eos_token_id is not None:
            listed.append(self.tokenizer.eos_token_id)
        return frozenset(listed)

    @property
    def pad_token_id(self) -> int:
        """Filler of padded batches; never looked at, since padding is masked by length."""
        return self.tokenizer.pad_token_id or 0

    def token_logprobs(self, batch: MicroBatch, *, return_entropy: bool = False) -> TokenLogprobs:
        """(T,) log-probs of the scored tokens under logits / temperature; differentiable."""
        with torch.autocast(
            self.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype != torch.float32
        ):
            hidden = self.model.get_decoder()(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
            ).last_hidden_state
            rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.positions)
            head = self.model.get_output_embeddings()
            if self._makes_logits(rows.shape[0]):
                logits = self._logits(head, rows)
                return token_logprobs(
                    logits,
                    batch.labels,
                    temperature=self.temperature,
                    return_entropy=return_entropy,
                )
        return linear_token_logprobs(
            rows.to(self.compute_dtype),
            head.weight.to(self.compute_dtype),
            batch.labels,
            bias=None if head.bias is None else head.bias.to(self.compute_dtype),
            temperature=self.temperature,
            return_entropy=return_entropy,
        )

    def _makes_logits(self, num_rows: int) -> bool:
        """Whether whole logits are made. Small ones save a second pass over the head, but only in
        float32: bfloat16 would round them, and a row would score otherwise in a larger batch."""
        if not has_plain_head(self.model):
            return True
        vocab = self.model.get_output_embeddings().weight.shape[0]
        is_small = 4 * num_rows * vocab <= MAX_LOGITS_BYTES
        return is_small and self.compute_dtype == torch.float32

    def _logits(self, head: nn.Module, rows: Tensor) -> Tensor:
        config = self.model.config.get_text_config()
        logits = head(rows)
        cap = getattr(config, "final_logit_softcapping", None)
        if cap:
            logits = cap * torch.tanh(logits / cap)
        divisor = getattr(config, "logits_scaling", None) or 1.0
        factor = getattr(config, "logit_scale", None) or 1.0
        return logits if divisor == factor else logits * (factor / divisor)

    @torch.no_grad()
    def check_head(self) -> None:
        """Raises ModelError where the model's logits are not those that `token_logprobs` scores:
        architectures bend them in ways of their own, and log-probs of others would train nonsense.
        """
        vocab = self.model.get_input_embeddings().num_embeddings
        ids = torch.arange(4, device=self.device)[None] % vocab
        hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        own = self._logits(self.model.get_output_embeddings(), hidden)
        expected = self.model(input_ids=ids, use_cache=False).logits
        if not torch.allclose(own, expected, rtol=1e-3, atol=1e-4):
            raise ModelError(
                "model.path: expected logits of the output head, divided by logits_scaling, "
                "times logit_scale or capped by final_logit_softcapping, got others from "
                f"{type(self.model).__name__}, off by {(own - expected).abs().max():.3g}; "
                "this architecture is not supported"
            )

    def engine_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The full float32 state dict, tied heads included: an engine that is not handed the head
        keeps its old copy and nothing complains. Engines convert to their own dtype."""
        yield from self.model.state_dict().items()

    def release_memory(self) -> None:
        """Give a GPU's unused memory back to the driver: an engine that wakes maps its own, and
        cannot use what torch keeps in reserve."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def num_trainable(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def frozen_copy(self) -> "Policy":
        """The policy as it is now, without gradient, weights in the compute dtype."""
        model = copy.deepcopy(self.model).to(self.compute_dtype).eval().requires_grad_(False)
        return Policy(
            model=model,
            tokenizer=self.tokenizer,
            device=self.device,
            compute_dtype=self.compute_dtype,
            temperature=self.temperature,
            path=self.path,
        )

    def save(self, folder: Path) -> None:
        """Model and tokenizer in Hugging Face format, as transformers and vLLM load it."""
        from transformers.utils import logging

        # A checkpoint is saved in the middle of our own progress line.
        was_shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        self.model.save_pretrained(folder)
        if was_shown:
            logging.enable_progress_bar()
        self.tokenizer.save_pretrained(folder)


def has_plain_head(model: Any) -> bool:
    """True where logits are head(hidden) and nothing else, so that they can be cut in chunks."""
    config = model.config.get_text_config()
    bends = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    is_bent = any(getattr(config, name, None) for name in bends)
    return isinstance(model.get_output_embeddings(), nn.Linear) and not is_bent


def load_policy(
    config: ModelConfig, *, temperature: float, device: torch.device, weights: Path | None = None
) -> Policy:
    """The policy of the config; `weights` is a checkpoint's folder to read them from instead.

    Raises:
        ModelError: the folder or id does not hold a causal language model with a tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(weights) if weights else model_path(config.path)
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path: expected a Hugging Face model folder or id with a tokenizer, got "
            f"{config.path!r}: {error}"
        ) from None
    model.to(device)  # pyright: ignore[reportArgumentType]
    turn_dropout_off(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    else:
        model.eval()
    policy = Policy(
        model=model,
        tokenizer=tokenizer,
        device=device,
        compute_dtype=compute_dtype(config.compute_dtype, device),
        temperature=temperature,
        path=path,
    )
    if not policy.eos_token_ids:
        raise ModelError(
            f"model.path: expected an end-of-sequence token in the tokenizer or the generation "
            f"config of {config.path!r}, got none; responses would never end"
        )
    policy.check_head()
    return policy


def model_path(path: str) -> str:
    """Folder of the built-in policy of a seed, or the path itself.

    A policy that is not there yet is warmed up first, which takes minutes and says so.
    """
    seed = builtin_seed(path)
    if seed is None:
        return path
    from xrpo_fast.tasks.seeded import WARMUP_CPU_S, cached_policy_dir, policy_dir

    folder = cached_policy_dir(seed)
    if not folder.exists():
        logger.info(
            f"model.path: warming up {path}, once, about {WARMUP_CPU_S} CPU seconds; kept in "
            f"{folder}"
        )
    return str(policy_dir(seed, _log_warmup))


def _log_warmup(step: int, num_steps: int) -> None:
    if step % (num_steps // 7) == 0:
        logger.info(f"warm-up: step {step}/{num_steps}")


def architecture_path(path: str) -> str:
    """Folder with configuration and tokenizer: those of the built-in policy are shipped, whatever
    its seed."""
    if builtin_seed(path) is None:
        return path
    from xrpo_fast.tasks.policy import POLICY_DIR

    return str(POLICY_DIR)


def builtin_seed(path: str) -> int | None:
    """Seed of a built-in policy; None for other paths.

    Raises:
        ModelError: neither builtin:symbols nor builtin:symbols?seed=N.
    """
    if not path.startswith("builtin:"):
        return None
    name, _, option = path.partition("?")
    key, _, seed = (option or "seed=0").partition("=")
    if name != BUILTIN_MODEL or key != "seed" or not re.fullmatch(r"[0-9]+", seed):
        raise ModelError(
            f"model.path: expected {BUILTIN_MODEL} or {BUILTIN_MODEL}?seed=N with an integer "
            f"N >= 0, got {path!r}"
        )
    return int(seed)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on CUDA, float32 elsewhere (bfloat16 is slower on most CPUs)."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def turn_dropout_off(model: nn.Module) -> None:
    """A ratio between two forwards with different dropout masks would not be one of policies."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010

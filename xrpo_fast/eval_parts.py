"""A config -> what an evaluation needs: engine, grader, held-out sets, and what identifies them."""

import hashlib
import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import xrpo_fast
from xrpo_fast import assemble, inputs
from xrpo_fast.config import Config, ConfigError
from xrpo_fast.eval_store import fingerprint, questions_fingerprint
from xrpo_fast.evaluator import Evaluator
from xrpo_fast.policy import Policy, load_policy
from xrpo_fast.types import Prompt

PROBED_VALUES = 4096
"""Values per tensor that the fingerprint of weights reads: any optimizer update changes some."""

GRADER_PACKAGES = {
    "math": ("math-verify", "latex2sympy2_extended", "sympy"),
    "reasoning_gym": ("reasoning-gym",),
}
"""Packages whose version decides what counts as right."""


@dataclass(kw_only=True, slots=True)
class EvaluationParts:
    """What an evaluation is made of."""

    evaluator: Evaluator
    sets: dict[str, list[Prompt]]
    grader: dict[str, Any]
    sampling: dict[str, Any]
    model_fingerprint: str

    @property
    def questions_fingerprints(self) -> dict[str, str]:
        """By set: which results can be compared."""
        return {name: questions_fingerprint(prompts) for name, prompts in self.sets.items()}

    @property
    def sample_fingerprints(self) -> dict[str, str]:
        """By set: model, rendered prompts, answers, sampling and grader."""
        return {
            name: fingerprint(
                [
                    self.model_fingerprint,
                    self.grader,
                    self.sampling,
                    [[p.id, p.token_ids, p.answer] for p in prompts],
                ]
            )
            for name, prompts in self.sets.items()
        }

    @property
    def fingerprint(self) -> str:
        """Of all sets together."""
        return fingerprint(self.sample_fingerprints)


def open_parts(config: Config, weights: Path | None, stack: ExitStack) -> EvaluationParts:
    """Start grader and engine; the stack closes them.

    Raises:
        ConfigError, DataError, ModelError: something cannot be used; the message names it.
    """
    verifier = stack.enter_context(inputs.start_verifier(config))
    equivalent = assemble.start_equivalence(config, stack)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    device = assemble.choose_device(config.run.device)
    temperature = config.rollout.temperature
    policy = load_policy(config.model, temperature=temperature, device=device, weights=weights)
    sets = inputs.load_eval_sets(config, inputs.make_template(config, policy.tokenizer, verifier))
    if not sets:
        raise ConfigError(
            "data.eval: expected at least one held-out set, got none; give --data SOURCE"
        )
    limit = config.eval.max_prompts
    sets = {name: prompts[: limit or len(prompts)] for name, prompts in sets.items()}
    length = assemble.model_length(
        config, assemble.position_limit(policy.model.config), list(sets.values())
    )
    engine = assemble.start_engine(config, policy, weights, length)
    stack.callback(engine.close)
    engine.wake()
    engine.load_weights(policy.engine_weights())
    return EvaluationParts(
        evaluator=Evaluator(
            engine=engine,
            verifier=verifier,
            decode=assemble.make_decode(config, policy),
            seed=config.run.seed,
            max_response_tokens=config.rollout.max_response_tokens,
            equivalent=equivalent,
        ),
        sets=sets,
        grader=grader_of(config),
        sampling={
            "temperature": temperature,
            "max_response_tokens": config.rollout.max_response_tokens,
            "seed": config.run.seed,
            "engine": type(engine).__name__,
            "dtype": str(assemble.engine_dtype(config, policy)).removeprefix("torch."),
            "eos_token_ids": sorted(policy.eos_token_ids),
            # Decides what of a response counts, but is the model's: not part of `grader`, by which
            # results are compared.
            "is_think_prefilled": verifier.is_think_prefilled,
        },
        model_fingerprint=weights_fingerprint(policy),
    )


def grader_of(config: Config) -> dict[str, Any]:
    """Names and versions of what decides whether an answer is right."""
    reward = config.reward
    return {
        "functions": {name: function_version(name) for name in reward.functions},
        "weights": reward.weights or [1.0] * len(reward.functions),
        "options": reward.options,
        "full_reward": reward.full_reward,
    }


def function_version(name: str) -> str:
    """Versions of the packages that a built-in reward is made of; a hash of a user's module."""
    if ":" in name and not name.startswith("builtin:"):
        from xrpo_fast.rewards.functions import load_function

        source = inspect.getsource(inspect.getmodule(load_function(name)))  # pyright: ignore
        return f"sha256 {hashlib.sha256(source.encode()).hexdigest()[:12]}"
    packages = [f"{package} {version(package)}" for package in GRADER_PACKAGES.get(name, ())]
    return ", ".join([f"xrpo_fast {xrpo_fast.__version__}", *packages])


@torch.no_grad()
def weights_fingerprint(policy: Policy) -> str:
    """Hash of values spread over every tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.model.state_dict().items()):
        flat = tensor.reshape(-1)
        probed = flat[:: max(1, flat.numel() // PROBED_VALUES)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(probed.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]

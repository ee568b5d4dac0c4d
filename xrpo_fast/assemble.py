"""A config -> the parts of a run, built in the order that their needs dictate.

Reward workers start before torch has threads; the engine comes after the model that it serves.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xrpo_fast.config import Config, ConfigError
from xrpo_fast.data import PromptSet
from xrpo_fast.evaluator import Evaluator, MathEquivalence
from xrpo_fast.exemplars import ExemplarStore, PromptStates
from xrpo_fast.inputs import (
    BUILTIN_DATA,
    load_eval_sets,
    load_training_prompts,
    make_template,
    report_data,
    start_verifier,
)
from xrpo_fast.metrics import Clock, DeviceSums
from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.policy import ModelError, Policy, load_policy, model_path
from xrpo_fast.prompt_sampler import PromptSampler
from xrpo_fast.rewards import Verifier
from xrpo_fast.rollouts import choose_engine, make_engine
from xrpo_fast.schedule import Collector
from xrpo_fast.seeding import PromptSeeder
from xrpo_fast.trainer import Trainer
from xrpo_fast.tree import TreeCollector
from xrpo_fast.types import Engine, Prompt, Sampling
from xrpo_fast.update import Updater

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Parts:
    """What a run is made of."""

    trainer: Trainer
    evaluator: Evaluator
    eval_sets: dict[str, list[Prompt]]
    engine: Engine
    checkpoint: Path | None
    closing: ExitStack = field(default_factory=ExitStack)
    """Ends the engine and the worker processes."""

    def close(self) -> None:
        self.closing.close()


def assemble(config: Config, *, checkpoint: Path | None = None) -> Parts:
    """Build every part of a run; `checkpoint` gives weights and position to go on from.

    Raises:
        ConfigError, DataError, ModelError: something cannot be used; the message names it.
    """
    with ExitStack() as stack:
        verifier = stack.enter_context(start_verifier(config))
        equivalent = start_equivalence(config, stack)
        parts = _assemble(config, verifier, equivalent, checkpoint)
        stack.callback(parts.engine.close)
        parts.closing = stack.pop_all()
        return parts


def start_equivalence(config: Config, stack: ExitStack) -> MathEquivalence | None:
    """What merges the answers that cons@k votes on, where they are mathematics."""
    if "math" not in config.reward.functions:
        return None
    equivalent = MathEquivalence(config.reward.timeout_s, config.reward.options.get("math", {}))
    stack.callback(equivalent.close)
    return equivalent


def _assemble(
    config: Config,
    verifier: Verifier,
    equivalent: MathEquivalence | None,
    checkpoint: Path | None,
) -> Parts:
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    device = choose_device(config.run.device)
    policy = load_policy(
        config.model, temperature=config.rollout.temperature, device=device, weights=checkpoint
    )
    if policy.num_trainable() == 0:
        raise ModelError("model.path: expected trainable parameters, got none")
    template = make_template(config, policy.tokenizer, verifier)
    prompts = load_training_prompts(config, template)
    eval_sets = load_eval_sets(config, template)
    report_data(prompts, eval_sets)
    clock, sums = Clock(), DeviceSums()
    max_model_len = model_length(
        config, position_limit(policy.model.config), [prompts.prompts, *eval_sets.values()]
    )
    check_streaming(config)
    reference = load_reference(config, policy, device)
    sampler = PromptSampler(len(prompts), config.run.seed)
    planner = make_planner(config, len(prompts))
    store, states = make_exemplars(config, prompts, eval_sets)
    seeder = (
        PromptSeeder(
            store,
            states,
            template,
            sampler,
            max_exemplar_tokens=config.icl.max_exemplar_tokens,
            max_prompt_tokens=max_model_len - config.rollout.max_response_tokens,
        )
        if store is not None
        else None
    )
    decode = make_decode(config, policy)
    # Last, since nothing after it can fail and leave it running.
    engine = start_engine(config, policy, checkpoint, max_model_len)
    limits: dict[str, Any] = {
        "seed": config.run.seed,
        "max_response_tokens": config.rollout.max_response_tokens,
    }
    trainer = Trainer(
        config=config,
        prompts=prompts,
        sampler=sampler,
        policy=policy,
        engine=engine,
        engine_dtype=engine_dtype(config, policy),
        planner=planner,
        collector=make_collector(
            config,
            seeder,
            engine=engine,
            planner=planner,
            verifier=verifier,
            decode=decode,
            clock=clock,
            **limits,
        ),
        seeder=seeder,
        exemplars=store,
        states=states,
        updater=Updater(
            policy=policy,
            reference=reference,
            loss=config.loss,
            optim=config.optim,
            max_response_tokens=config.rollout.max_response_tokens,
            sums=sums,
        ),
        clock=clock,
    )
    evaluator = Evaluator(
        engine=engine, verifier=verifier, decode=decode, equivalent=equivalent, **limits
    )
    return Parts(
        trainer=trainer,
        evaluator=evaluator,
        eval_sets=eval_sets,
        engine=engine,
        checkpoint=checkpoint,
    )


def make_collector(
    config: Config, seeder: PromptSeeder | None, **shared: Any
) -> Collector | TreeCollector:
    """Rollouts one by one, or as trees."""
    if config.tree.enabled:
        return TreeCollector(tree=config.tree, **shared)
    return Collector(seeder=seeder, **shared)


def make_decode(config: Config, policy: Policy) -> Callable[[Sequence[int]], str]:
    """Token ids -> the text that the verifier sees."""
    # The built-in verifier wants to see the '$' that ends a response, which is its EOS.
    skip_special_tokens = not config.data.train.startswith(BUILTIN_DATA)

    def decode(token_ids: Sequence[int]) -> str:
        return policy.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    return decode


def choose_device(name: str) -> torch.device:
    """auto: CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("run.device: expected a CUDA device for 'cuda', found none; use 'cpu'")
    return torch.device(name)


def check_streaming(config: Config) -> None:
    """Streaming allocation refills slots while others run, which only vLLM can."""
    is_streaming = config.planner.allocation == "streaming"
    if is_streaming and choose_engine(config.rollout.engine) == "transformers":
        raise ConfigError(
            'planner.allocation: expected "proportional" or "greedy" with the transformers '
            'engine, which runs whole batches, got "streaming"; use rollout.engine = "vllm"'
        )


def position_limit(model_config: Any) -> int:
    """Tokens that the model can take; some configurations state no limit."""
    text_config = model_config.get_text_config()
    return getattr(text_config, "max_position_embeddings", None) or sys.maxsize


def model_length(config: Config, limit: int, sets: list[list[Prompt]]) -> int:
    """Tokens of prompt and response that the engine must hold: the longest prompt, worked examples
    in front of it, and a full response; within what the model can take."""
    longest_prompt = max(len(prompt.token_ids) for prompts in sets for prompt in prompts)
    needed = longest_prompt + config.rollout.max_response_tokens
    if needed > limit:
        raise ConfigError(
            f"rollout.max_response_tokens: expected at most {limit - longest_prompt} (the model "
            f"holds {limit} tokens, the longest prompt has {longest_prompt}), got "
            f"{config.rollout.max_response_tokens}; lower it or data.max_prompt_tokens"
        )
    if config.icl.enabled:
        # A worked example is a question and a response.
        needed += config.icl.num_exemplars * (longest_prompt + config.icl.max_exemplar_tokens)
    return min(needed, limit)


def start_engine(
    config: Config, policy: Policy, checkpoint: Path | None, max_model_len: int
) -> Engine:
    return make_engine(
        config.rollout.engine,
        model=policy.model,
        model_path=str(checkpoint) if checkpoint else model_path(config.model.path),
        sampling=Sampling(
            temperature=config.rollout.temperature, eos_token_ids=policy.eos_token_ids
        ),
        max_slots=config.rollout.max_concurrent,
        pad_token_id=policy.pad_token_id,
        dtype=engine_dtype(config, policy),
        max_model_len=max_model_len,
        seed=config.run.seed,
        gpu_memory_fraction=config.rollout.gpu_memory_fraction,
        trust_remote_code=config.model.trust_remote_code,
    )


def engine_dtype(config: Config, policy: Policy) -> torch.dtype:
    """Of the engine's weights; auto: the trainer's compute dtype."""
    name = config.rollout.engine_dtype
    return policy.compute_dtype if name == "auto" else getattr(torch, name)


def make_planner(config: Config, num_prompts: int) -> RolloutPlanner:
    rollout = config.rollout
    per_step = min(rollout.prompts_per_step, num_prompts)
    if per_step < rollout.prompts_per_step:
        logger.warning(
            f"rollout.prompts_per_step is {rollout.prompts_per_step}, but the data set has "
            f"{num_prompts} prompts: each step takes them all"
        )
    try:
        return _make_planner(config, per_step)
    except ValueError as error:
        raise ConfigError(f"planner.{error}") from error


def _make_planner(config: Config, per_step: int) -> RolloutPlanner:
    planner, rollout = config.planner, config.rollout
    return RolloutPlanner(
        per_step,
        total_rollouts=round(per_step * rollout.rollouts_per_prompt),
        base_rollouts=config.base_rollouts,
        rounds=planner.rounds,
        exploration=planner.exploration,
        confidence=planner.confidence,
        allocation=planner.allocation,
        max_rollouts_per_prompt=planner.max_rollouts_per_prompt or None,
        std=planner.std,
        exploration_mode=planner.exploration_mode,
        history=planner.history,
        global_rollouts=planner.global_rollouts,
        seed=config.run.seed,
    )


def make_exemplars(
    config: Config, prompts: PromptSet, eval_sets: dict[str, list[Prompt]]
) -> tuple[ExemplarStore | None, PromptStates | None]:
    icl = config.icl
    if not icl.enabled:
        return None, None
    is_builtin = config.data.train.startswith(BUILTIN_DATA)
    embedder = icl.embedder
    if embedder == "auto":
        embedder = "codes" if is_builtin else "tfidf"
    try:
        store = _make_store(config, embedder, prompts, eval_sets)
    except ValueError as error:
        raise ConfigError(f"icl.{error}") from error
    return store, PromptStates(len(prompts)) if icl.prompt_states else None


def _make_store(
    config: Config, embedder: str, prompts: PromptSet, eval_sets: dict[str, list[Prompt]]
) -> ExemplarStore:
    icl, is_builtin = config.icl, config.data.train.startswith(BUILTIN_DATA)
    return ExemplarStore(
        prompts.prompts,
        [prompt for held_out in eval_sets.values() for prompt in held_out],
        embedder=embedder,
        num_exemplars=icl.num_exemplars,
        min_similarity=icl.min_similarity,
        max_similarity=None if is_builtin else icl.max_similarity,
        max_age_steps=icl.max_age_steps,
        max_bytes=round(icl.max_corpus_mib * 2**20),
        kind="generated" if is_builtin else "natural",
        cache_dir=None if is_builtin else config.run.output_dir / ".neighbours",
    )


def load_reference(config: Config, policy: Policy, device: torch.device) -> Policy | None:
    """The initial policy, frozen; only where there is a KL term."""
    if not config.loss.kl_weight:
        return None
    initial = load_policy(config.model, temperature=config.rollout.temperature, device=device)
    return initial.frozen_copy()

"""Every key of a config file, with its default, bounds and meaning. config_file.py reads it."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

Algorithm = Literal["xrpo", "grpo", "dr_grpo", "gspo", "gspo_token", "dapo", "treepo"]


class ConfigError(ValueError):
    """The configuration, or the model or data that it names, cannot be used; the message names the
    key and the cure. Exit code 2."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not changed after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunConfig(Section):
    name: str = ""
    """Folder under output_dir; the stem of the config file where empty."""
    output_dir: Path = Path("runs")
    """Where run folders are made."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Reaches data order, engine (per request) and training."""
    steps: int = Field(default=100, ge=1)
    """Training steps, one rollout batch each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto takes CUDA where there is one."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch and the kernels; 0 leaves torch's choice."""


class ModelConfig(Section):
    path: str = "builtin:symbols"
    """Hugging Face folder or id; builtin:symbols[?seed=N] is the tiny policy of this package."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward and backward; weights stay float32. auto: bfloat16 on CUDA, else float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    trust_remote_code: bool = False
    """Run the model code that a hub repository ships."""


class DataConfig(Section):
    train: str = "builtin:symbols"
    """A .jsonl or .parquet file, a data set folder or hub id, builtin:symbols[?seed=N],
    reasoning_gym:<dataset>[?size=N]."""
    eval: dict[str, str] = Field(default_factory=dict)
    """Held-out sets by name, each a source as `train`; builtin:symbols brings its own."""
    split: str = "train"
    """Split of `train`."""
    eval_split: str = "test"
    """Split of the sets in `eval`."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our name -> the data set's, for prompt, answer, id, tier and any argument of a reward."""
    template: Literal["auto", "chat", "raw"] = "auto"
    """chat renders the tokenizer's chat template; raw takes text as it is; auto: chat if any."""
    instruction: str = ""
    """Appended to each question after a blank line, e.g. how to give the final answer."""
    system_prompt: str = ""
    """System turn of the chat template."""
    chat_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, e.g. {enable_thinking = false} for Qwen3."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are dropped at load and counted."""
    limit: int = Field(default=0, ge=0)
    """Use only the first N training prompts; 0 takes all."""

    @field_validator("eval")
    @classmethod
    def _check_eval_names(cls, sets: dict[str, str]) -> dict[str, str]:
        for name in sets:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise ValueError(
                    "data.eval: expected names of letters, digits, '_', '.' and '-' (they name "
                    f"files), got {name!r}"
                )
        return sets


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=32, ge=1)
    """P, prompts in each step."""
    rollouts_per_prompt: float = Field(default=8.0, ge=1)
    """Mean over the prompts of a step; P times it is the step's budget."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longer responses are cut and count as truncated."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Divides the logits, in the engine and in the trainer."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """auto: vLLM where it is installed, else transformers."""
    max_concurrent: int = Field(default=256, ge=1)
    """Rollouts that the engine runs at once (its slots)."""
    gpu_memory_fraction: float = Field(default=0.5, gt=0, le=1)
    """Of the GPU, for vLLM's weights and KV cache."""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """In which the engine computes, transformers too; auto: the trainer's compute dtype."""


class PlannerConfig(Section):
    allocation: Literal["proportional", "greedy", "streaming", "uniform", "dapo"] = "proportional"
    """proportional: rounds shared by priority; greedy: one at a time to the largest priority;
    streaming: greedy whenever a slot frees, no barriers; uniform: equal counts, one phase; dapo:
    equal counts for P / (rounds + 1) prompts, those without signal replaced in each round and left
    out of the loss; what was never rolled out comes in the next step."""
    base_rollouts: int = Field(default=0, ge=0)
    """Rollouts of each prompt before the planner decides; 0: half the mean, at least 2. No effect
    with uniform and dapo."""
    rounds: int = Field(default=2, ge=1)
    """Planned rounds after the base; with dapo, refills."""
    exploration: float = Field(default=0.1, ge=0)
    """lambda, weight of the exploration bonus."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """1 - alpha of the Student-t interval."""
    max_rollouts_per_prompt: int = Field(default=0, ge=0)
    """Cap of a prompt in one step; 0: none."""
    std: Literal["sample", "jeffreys", "pooled"] = "sample"
    """Estimate of the rewards' standard deviation."""
    exploration_mode: Literal["absolute", "relative"] = "absolute"
    """relative: the bonuses sum to 0.3 of the sum of the uncertainty reductions."""
    global_rollouts: Literal["step", "run", "train_step"] = "step"
    """What T counts in the exploration bonus."""
    history: bool = False
    """Carry a Beta prior per prompt across steps and allocate by expected yield."""


class TreeConfig(Section):
    enabled: bool = False
    """Rollouts of a prompt grow as one tree of shared segments (TreePO), and their advantages come
    from its subtrees."""
    segment_tokens: int = Field(default=512, ge=1)
    """Tokens between two points where a path may fork."""
    min_fanout: int = Field(default=2, ge=1)
    """Fewest paths that start at the prompt."""
    max_fanout: int = Field(default=8, ge=1)
    """Most; the number is drawn per prompt and step."""
    max_depth: int = Field(default=14, ge=1)
    """Most segments of a response; one that has not ended then counts as truncated."""


class IclConfig(Section):
    enabled: bool = False
    """Seed prompts whose rollouts all failed with worked examples."""
    num_exemplars: int = Field(default=2, ge=1)
    """K, worked examples in front of the question."""
    train_prompt: Literal["original", "seeded", "original_shaped", "baseline_only"] = "original"
    """The prompt that seeded rows are trained under."""
    embedder: str = "auto"
    """auto: TF-IDF, no download; else a sentence-transformers id or folder."""
    min_similarity: float = Field(default=0.5, gt=0, le=1)
    """Cosine below which an exemplar is not suitable."""
    max_similarity: float = Field(default=0.95, gt=0, le=1)
    """Cosine from which an exemplar counts as the same problem (natural-language data)."""
    max_age_steps: int = Field(default=200, ge=1)
    """Older exemplars leave the corpus."""
    max_corpus_mib: float = Field(default=256.0, gt=0)
    """Cap of the corpus; the oldest leave first."""
    max_exemplar_tokens: int = Field(default=1024, ge=1)
    """Longer exemplars are cut: head 60 %, tail 40 %; below 256 tokens they are skipped instead."""
    prompt_states: bool = False
    """Back off from prompts that stay hopeless when seeded: skip epochs, audit, list as suspect."""


class NoveltyConfig(Section):
    enabled: bool = False
    """Raise the advantage of correct answers that the policy finds unlikely."""
    weight: float = Field(default=2.5, ge=0)
    """Of (1 - eta)."""
    clip: float = Field(default=0.5, ge=0)
    """The bonus is at most this share of the advantage."""
    logprobs: Literal["auto", "sampler"] = "auto"
    """auto: the trainer's old log-probs where the loss needs them anyway, else the sampler's."""
    normalise: Literal["mean", "length_residual"] = "mean"
    """length_residual: scores are residuals of a fit on log length over the step."""


class LossConfig(Section):
    objective: Literal["grpo", "dr_grpo", "gspo", "gspo_token", "dapo"] = "grpo"
    """The loss; one file each in xrpo_fast/objectives."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(default=0.2, ge=0)
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Bound of the loss of negative advantages, in multiples of abs(A), more than 1; 0: none."""
    kl_weight: float = Field(default=0.0, ge=0)
    """beta of the k3 penalty towards the initial policy."""
    scale: Literal["group", "batch", "none"] = "group"
    """The standard deviation that advantages are divided by."""
    group_weight: Literal["rollout", "prompt", "effective"] = "rollout"
    """rollout: each rollout counts once; prompt: each prompt; effective: groups with signal."""
    mismatch: Literal["none", "tis"] = "none"
    """tis: weight tokens by min(p_trainer / p_sampler, 2)."""
    truncated: Literal["keep", "mask"] = "keep"
    """mask: truncated rows leave numerator and denominator."""
    overlong_buffer_frac: float = Field(default=0.0, ge=0, lt=1)
    """Soft penalty from 0 to -1 over this last share of the response limit; 0: none."""

    @field_validator("dual_clip")
    @classmethod
    def _check_dual_clip(cls, bound: float) -> float:
        if 0 < bound <= 1:
            raise ValueError(
                "loss.dual_clip: expected 0 (off) or more than 1 (up to 1 it cuts the gradient of "
                f"every negative advantage at ratio 1), got {bound:g}"
            )
        return bound


class OptimConfig(Section):
    learning_rate: float = Field(default=1e-6, gt=0)
    """Of AdamW, after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates over which the learning rate rises linearly."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of AdamW."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Of AdamW."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates per rollout batch, mini-batches cut by prompt."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Padded tokens in one forward and backward; changes memory and speed, never the loss."""


class RewardConfig(Section):
    functions: list[str] = Field(default_factory=lambda: ["math"], min_length=1)
    """math, code, exact, reasoning_gym, builtin:symbols, or module:function with TRL's
    signature."""
    weights: list[float] = Field(default_factory=list)
    """Of the functions, in order; empty: 1 each."""
    full_reward: float = 1.0
    """Reward from which a rollout counts as solved."""
    workers: int = Field(default=2, ge=0)
    """Worker processes; 0 runs cheap trusted functions inline."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Wall-clock bound of one verification; its worker is killed then."""
    max_error_frac: float = Field(default=0.05, ge=0, le=1)
    """The run stops when more of the verifications fail to run, beyond what chance explains."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Of the built-in functions, by name, e.g. { math = { answer_format = "any" } }; the keys are
    the fields of MathPolicy and CodePolicy."""


class EvalConfig(Section):
    every_steps: int = Field(default=10, ge=0)
    """0: only before and after training."""
    samples: int = Field(default=4, ge=1)
    """Rollouts per held-out prompt during training."""
    final_samples: int = Field(default=8, ge=1)
    """Rollouts per held-out prompt before and after training."""
    k: list[PositiveInt] = Field(default_factory=lambda: [1, 4], min_length=1)
    """pass@k and cons@k to report, where there are that many samples."""
    max_prompts: int = Field(default=0, ge=0)
    """First N prompts of each set; 0: all."""


class CheckpointConfig(Section):
    every_steps: int = Field(default=50, ge=1)
    """A checkpoint is also written at the end."""
    keep: int = Field(default=2, ge=1)
    """Older ones are removed."""


class LogConfig(Section):
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Besides metrics.jsonl, which is always written."""
    rollouts: bool = True
    """Write each step's rollouts as Parquet."""
    rollout_text: int = Field(default=8, ge=0)
    """Responses per step written as text too; the others as numbers only."""


class Config(Section):
    algorithm: Algorithm = "xrpo"
    """Names the preset whose values stand where the file says nothing."""
    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    planner: PlannerConfig = Field(default_factory=PlannerConfig)
    tree: TreeConfig = Field(default_factory=TreeConfig)
    icl: IclConfig = Field(default_factory=IclConfig)
    novelty: NoveltyConfig = Field(default_factory=NoveltyConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @property
    def total_rollouts(self) -> int:
        """Budget of a full step."""
        return round(self.rollout.prompts_per_step * self.rollout.rollouts_per_prompt)

    @property
    def base_rollouts(self) -> int:
        """Rollouts per prompt before the planner decides; all of them where it does not."""
        if self.planner.allocation in ("uniform", "dapo"):
            return int(self.rollout.rollouts_per_prompt)
        return self.planner.base_rollouts or max(2, int(self.rollout.rollouts_per_prompt // 2))

    @model_validator(mode="after")
    def _check_across_sections(self) -> "Config":
        planned = self.planner.allocation in ("proportional", "greedy", "streaming")
        base = self.base_rollouts * self.rollout.prompts_per_step
        if planned and base > self.total_rollouts:
            raise ValueError(
                f"planner.base_rollouts: expected at most rollout.rollouts_per_prompt = "
                f"{self.rollout.rollouts_per_prompt:g}, got {self.base_rollouts}; lower it or "
                "raise rollout.rollouts_per_prompt"
            )
        if planned and self.base_rollouts < 2:
            raise ValueError(
                "planner.base_rollouts: expected at least 2 (the Student-t interval needs a "
                f"standard deviation), got {self.base_rollouts}"
            )
        if self.icl.enabled and not planned:
            raise ValueError(
                "icl.enabled: expected a planner.allocation with rounds after the base (only they "
                f'are seeded), got "{self.planner.allocation}"; set icl.enabled = false, or a '
                "large planner.exploration for a nearly equal plan in rounds"
            )
        if self.icl.enabled and base == self.total_rollouts:
            raise ValueError(
                "icl.enabled: expected a budget above the base (only later rollouts are seeded), "
                f"got planner.base_rollouts = rollout.rollouts_per_prompt = {self.base_rollouts}; "
                "lower the first, raise the second, or set icl.enabled = false"
            )
        if self.icl.prompt_states and not self.icl.enabled:
            raise ValueError(
                "icl.prompt_states: expected false with icl.enabled = false (only seeded prompts "
                "have states), got true; set icl.enabled = true, or leave it out"
            )
        if self.planner.allocation == "dapo" and self.rollout.rollouts_per_prompt % 1:
            raise ValueError(
                "rollout.rollouts_per_prompt: expected a whole number (the group size) with "
                f'planner.allocation = "dapo", got {self.rollout.rollouts_per_prompt:g}'
            )
        if self.icl.min_similarity >= self.icl.max_similarity:
            raise ValueError(
                f"icl.min_similarity: expected less than icl.max_similarity = "
                f"{self.icl.max_similarity:g}, got {self.icl.min_similarity:g}"
            )
        if max(self.eval.k) > self.eval.final_samples:
            raise ValueError(
                f"eval.k: expected at most eval.final_samples = {self.eval.final_samples}, got "
                f"{max(self.eval.k)}"
            )
        if len(self.reward.functions) > 1 and "full_reward" not in self.reward.model_fields_set:
            raise ValueError(
                "reward.full_reward: expected to be set with more than one reward function, since "
                "their sum decides what counts as solved"
            )
        if self.reward.weights and len(self.reward.weights) != len(self.reward.functions):
            raise ValueError(
                f"reward.weights: expected one per function = {len(self.reward.functions)}, "
                f"got {len(self.reward.weights)}"
            )
        return self

    @model_validator(mode="after")
    def _check_tree(self) -> "Config":
        if not self.tree.enabled:
            return self
        needs = [
            ("planner.allocation", self.planner.allocation, "uniform", "trees of equal width"),
            ("icl.enabled", self.icl.enabled, False, "one prompt for a whole tree"),
            ("novelty.enabled", self.novelty.enabled, False, "advantages are those of subtrees"),
            ("loss.scale", self.loss.scale, "batch", "advantages are whitened over the step"),
        ]
        for key, value, needed, reason in needs:
            if value != needed:
                raise ValueError(
                    f"{key}: expected {needed!r} with tree.enabled ({reason}), got {value!r}"
                )
        width = self.rollout.rollouts_per_prompt
        if width % 1 or width < self.tree.min_fanout:
            raise ValueError(
                "rollout.rollouts_per_prompt: expected a whole number of leaves, at least "
                f"tree.min_fanout = {self.tree.min_fanout}, with tree.enabled, got {width:g}"
            )
        if self.tree.max_fanout < self.tree.min_fanout:
            raise ValueError(
                f"tree.max_fanout: expected at least tree.min_fanout = {self.tree.min_fanout}, "
                f"got {self.tree.max_fanout}"
            )
        return self

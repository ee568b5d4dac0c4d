"""The run's configuration: TOML sections as pydantic models, presets under them, overrides on top.

    preset of the algorithm  <  config file  <  --section.key value

An unknown key is an error that names the nearest valid one, or ours where it is another trainer's.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

Algorithm = Literal["xrpo", "grpo", "dr_grpo", "gspo", "gspo_token", "dapo"]


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
    seed: int = Field(0, ge=0, lt=2**31)
    """Reaches data order, engine (per request) and training."""
    steps: int = Field(100, ge=1)
    """Training steps, one rollout batch each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto takes CUDA where there is one."""
    threads: int = Field(0, ge=0)
    """CPU threads of torch and the kernels; 0 leaves torch's choice."""


class ModelConfig(Section):
    path: str = "builtin:symbols"
    """Hugging Face folder or id; builtin:symbols is the tiny policy of this package."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward and backward; weights stay float32. auto: bfloat16 on CUDA, else float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    trust_remote_code: bool = False
    """Run the model code that a hub repository ships."""


class DataConfig(Section):
    train: str = "builtin:symbols"
    """A .jsonl or .parquet file, a data set folder or hub id, builtin:symbols[?seed=N]."""
    eval: dict[str, str] = Field(default_factory=dict)
    """Held-out sets by name, each a source as `train`; builtin:symbols brings its own."""
    split: str = "train"
    """Split of `train`."""
    eval_split: str = "test"
    """Split of the sets in `eval`."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our name -> the data set's, for prompt, answer, id and tier."""
    template: Literal["auto", "chat", "raw"] = "auto"
    """chat renders the tokenizer's chat template; raw takes text as it is; auto: chat if any."""
    instruction: str = ""
    """Appended to each question after a blank line, e.g. how to give the final answer."""
    system_prompt: str = ""
    """System turn of the chat template."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are dropped at load and counted."""
    limit: int = Field(0, ge=0)
    """Use only the first N training prompts; 0 takes all."""


class RolloutConfig(Section):
    prompts_per_step: int = Field(32, ge=1)
    """P, prompts in each step."""
    rollouts_per_prompt: float = Field(8.0, ge=1)
    """Mean over the prompts of a step; P times it is the step's budget."""
    max_response_tokens: int = Field(1024, ge=1)
    """Longer responses are cut and count as truncated."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits, in the engine and in the trainer."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """auto: vLLM where it is installed, else transformers."""
    max_concurrent: int = Field(256, ge=1)
    """Rollouts that the engine runs at once (its slots)."""
    gpu_memory_fraction: float = Field(0.5, gt=0, le=1)
    """Of the GPU, for vLLM's weights and KV cache."""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of vLLM's weights; auto: the trainer's compute dtype."""


class PlannerConfig(Section):
    allocation: Literal["proportional", "greedy", "streaming", "uniform"] = "proportional"
    """proportional: rounds shared by priority; greedy: one at a time to the largest priority;
    streaming: greedy whenever a slot frees, no barriers; uniform: equal counts, one phase."""
    base_rollouts: int = Field(0, ge=0)
    """Rollouts of each prompt before the planner decides; 0: half the mean, at least 2."""
    rounds: int = Field(2, ge=1)
    """Planned rounds after the base."""
    exploration: float = Field(0.1, ge=0)
    """lambda, weight of the exploration bonus."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """1 - alpha of the Student-t interval."""
    max_rollouts_per_prompt: int = Field(0, ge=0)
    """Cap of a prompt in one step; 0: none."""
    std: Literal["sample", "jeffreys", "pooled"] = "sample"
    """Estimate of the rewards' standard deviation."""
    exploration_mode: Literal["absolute", "relative"] = "absolute"
    """relative: the bonuses sum to 0.3 of the sum of the uncertainty reductions."""
    global_rollouts: Literal["step", "run", "train_step"] = "step"
    """What T counts in the exploration bonus."""
    history: bool = False
    """Carry a Beta prior per prompt across steps and allocate by expected yield."""


class IclConfig(Section):
    enabled: bool = False
    """Seed prompts whose rollouts all failed with worked examples."""
    num_exemplars: int = Field(2, ge=1)
    """K, worked examples in front of the question."""
    train_prompt: Literal["original", "seeded", "original_shaped", "baseline_only"] = "original"
    """The prompt that seeded rows are trained under."""
    embedder: str = "auto"
    """auto: TF-IDF, no download; else a sentence-transformers id or folder."""
    min_similarity: float = Field(0.5, ge=-1, le=1)
    """Cosine below which an exemplar is not suitable."""
    max_similarity: float = Field(0.95, gt=0, le=1)
    """Cosine from which an exemplar counts as the same problem (natural-language data)."""
    max_age_steps: int = Field(200, ge=1)
    """Older exemplars leave the corpus."""
    max_corpus_mib: float = Field(256.0, gt=0)
    """Cap of the corpus; the oldest leave first."""
    max_exemplar_tokens: int = Field(1024, ge=1)
    """Longer exemplars are cut: head 60 %, tail 40 %; below 256 tokens they are skipped instead."""
    prompt_states: bool = False
    """Back off from prompts that stay hopeless when seeded: skip epochs, audit, list as suspect."""


class NoveltyConfig(Section):
    enabled: bool = False
    """Raise the advantage of correct answers that the policy finds unlikely."""
    weight: float = Field(2.5, ge=0)
    """Of (1 - eta)."""
    clip: float = Field(0.5, ge=0)
    """The bonus is at most this share of the advantage."""
    logprobs: Literal["auto", "sampler"] = "auto"
    """auto: the trainer's old log-probs where the loss needs them anyway, else the sampler's."""
    normalise: Literal["mean", "length_residual"] = "mean"
    """length_residual: scores are residuals of a fit on log length over the step."""


class LossConfig(Section):
    objective: Literal["grpo", "dr_grpo", "gspo", "gspo_token", "dapo"] = "grpo"
    """The loss; one file each in xrpo_fast/objectives."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(0.2, ge=0)
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: float = Field(0.0, ge=0)
    """Bound of the loss of negative advantages, in multiples of abs(A); 0: none."""
    kl_weight: float = Field(0.0, ge=0)
    """beta of the k3 penalty towards the initial policy."""
    scale: Literal["group", "batch", "none"] = "group"
    """The standard deviation that advantages are divided by."""
    group_weight: Literal["rollout", "prompt", "effective"] = "rollout"
    """rollout: each rollout counts once; prompt: each prompt; effective: groups with signal."""
    mismatch: Literal["none", "tis"] = "none"
    """tis: weight tokens by min(p_trainer / p_sampler, 2)."""
    truncated: Literal["keep", "mask"] = "keep"
    """mask: truncated rows leave numerator and denominator."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Soft penalty from 0 to -1 over the last N tokens before the limit; 0: none."""


class OptimConfig(Section):
    learning_rate: float = Field(1e-6, gt=0)
    """Of AdamW, after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer updates over which the learning rate rises linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Of AdamW."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Of AdamW."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates per rollout batch, mini-batches cut by prompt."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Padded tokens in one forward and backward; changes memory and speed, never the loss."""


class RewardConfig(Section):
    functions: list[str] = Field(default_factory=lambda: ["math"], min_length=1)
    """math, code, exact, builtin:symbols, or module:function with TRL's signature."""
    weights: list[float] = Field(default_factory=list)
    """Of the functions, in order; empty: 1 each."""
    full_reward: float = 1.0
    """Reward from which a rollout counts as solved."""
    workers: int = Field(2, ge=0)
    """Worker processes; 0 runs cheap trusted functions inline."""
    timeout_s: float = Field(10.0, gt=0)
    """Wall-clock bound of one verification; its worker is killed then."""
    max_error_frac: float = Field(0.05, ge=0, le=1)
    """The run stops when more of the verifications fail to run."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Of the built-in functions, by name, e.g. { math = { answer_format = "any" } }; the keys are
    the fields of MathPolicy and CodePolicy."""


class EvalConfig(Section):
    every_steps: int = Field(10, ge=0)
    """0: only before and after training."""
    samples: int = Field(4, ge=1)
    """Rollouts per held-out prompt during training."""
    final_samples: int = Field(8, ge=1)
    """Rollouts per held-out prompt before and after training."""
    k: list[PositiveInt] = Field(default_factory=lambda: [1, 4], min_length=1)
    """pass@k and cons@k to report, where there are that many samples."""
    max_prompts: int = Field(0, ge=0)
    """First N prompts of each set; 0: all."""


class CheckpointConfig(Section):
    every_steps: int = Field(50, ge=1)
    """A checkpoint is also written at the end."""
    keep: int = Field(2, ge=1)
    """Older ones are removed."""


class LogConfig(Section):
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Besides metrics.jsonl, which is always written."""
    rollouts: bool = True
    """Write each step's rollouts as Parquet."""
    rollout_text: int = Field(8, ge=0)
    """Responses per step written as text too; the others as numbers only."""


class Config(Section):
    algorithm: Algorithm = "xrpo"
    """Names the preset whose values stand where the file says nothing."""
    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    planner: PlannerConfig = Field(default_factory=PlannerConfig)
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
        """Rollouts per prompt before the planner decides."""
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
        if self.reward.weights and len(self.reward.weights) != len(self.reward.functions):
            raise ValueError(
                f"reward.weights: expected one per function = {len(self.reward.functions)}, "
                f"got {len(self.reward.weights)}"
            )
        if self.loss.overlong_buffer_tokens >= self.rollout.max_response_tokens:
            raise ValueError(
                "loss.overlong_buffer_tokens: expected less than rollout.max_response_tokens = "
                f"{self.rollout.max_response_tokens}, got {self.loss.overlong_buffer_tokens}"
            )
        return self


FOREIGN_KEYS = {
    "num_generations": "rollout.rollouts_per_prompt",
    "rollout.n": "rollout.rollouts_per_prompt",
    "n_samples_per_prompt": "rollout.rollouts_per_prompt",
    "group_size": "rollout.rollouts_per_prompt",
    "max_completion_length": "rollout.max_response_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "generate_max_len": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "train_batch_size": "rollout.prompts_per_step",
    "rollout_batch_size": "rollout.prompts_per_step",
    "generation_batch_size": "rollout.prompts_per_step",
    "beta": "loss.kl_weight",
    "kl_coef": "loss.kl_weight",
    "kl_loss_coef": "loss.kl_weight",
    "init_kl_coef": "loss.kl_weight",
    "epsilon": "loss.clip_low",
    "epsilon_low": "loss.clip_low",
    "clip_ratio": "loss.clip_low",
    "clip_ratio_low": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "clip_ratio_high": "loss.clip_high",
    "loss_type": "loss.objective",
    "loss_mode": "loss.objective",
    "adv_estimator": "algorithm",
    "num_iterations": "optim.updates_per_step",
    "ppo_epochs": "optim.updates_per_step",
    "ppo_mini_batch_size": "optim.updates_per_step",
    "lr": "optim.learning_rate",
    "actor_learning_rate": "optim.learning_rate",
    "max_grad_norm": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "warmup_ratio": "optim.warmup_steps",
    "lr_warmup_steps": "optim.warmup_steps",
    "per_device_train_batch_size": "optim.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "optim.micro_batch_tokens",
    "micro_train_batch_size": "optim.micro_batch_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory_fraction",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_fraction",
    "use_vllm": "rollout.engine",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "dataset_name": "data.train",
    "train_files": "data.train",
    "prompt_data": "data.train",
    "max_steps": "run.steps",
    "total_training_steps": "run.steps",
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "eval_steps": "eval.every_steps",
    "test_freq": "eval.every_steps",
    "report_to": "log.trackers",
    "scale_rewards": "loss.scale",
    "mask_truncated_completions": "loss.truncated",
}
"""Names of TRL, verl and OpenRLHF -> ours."""


def preset_values(algorithm: str) -> dict[str, Any]:
    """Values of a preset file, xrpo_fast/presets/<algorithm>.toml."""
    return tomllib.loads((files("xrpo_fast") / "presets" / f"{algorithm}.toml").read_text())


def load_config(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Read a TOML file, put the algorithm's preset under it and the overrides on top.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, a value is out of range.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"config: expected an existing file, got {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"config: expected a TOML file, got {path}: {error}") from None
    for key, text in overrides:
        _set(values, key, _parse(text))
    if not _get(values, "run.name"):
        _set(values, "run.name", path.stem)
    return make_config(values)


def make_config(values: Mapping[str, Any]) -> Config:
    """Config from nested values, preset underneath; ConfigError names the key and the cure."""
    algorithm = values.get("algorithm", "xrpo")
    known = Algorithm.__args__
    if algorithm not in known:
        raise ConfigError(f"algorithm: expected one of {', '.join(known)}, got {algorithm!r}")
    try:
        return Config.model_validate(_merge(preset_values(algorithm), values))
    except ValidationError as error:
        raise ConfigError("\n".join(_message(item) for item in error.errors())) from None


def dump_config(config: Config) -> str:
    """The resolved configuration as TOML; load_config of it gives the same Config."""
    import tomli_w

    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = _merge(old, value) if both else value
    return merged


def _parse(text: str) -> Any:
    """A command-line value as TOML would read it; what is not TOML is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key}: expected a section before the last dot, got a value")
    values[last] = value


def _get(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return None
        values = values[part]
    return values


def valid_keys() -> list[str]:
    """Every key a config file may hold, as section.key."""
    keys = ["algorithm"]
    for section, field in Config.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, Section):
            keys += [f"{section}.{key}" for key in model.model_fields]
    return keys


def _message(item: Any) -> str:
    """One error of pydantic in our form: key, expected, got, cure."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return _unknown_key_message(key)
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    expected = re.sub(r"^(Input should be|\w+ should have) ", "", item["msg"])
    return f"{key}: expected {expected}, got {item['input']!r}"


def _unknown_key_message(key: str) -> str:
    section, _, last = key.rpartition(".")
    where = f"in section [{section}]" if section else "at the top level"
    ours = FOREIGN_KEYS.get(key) or FOREIGN_KEYS.get(last)
    if ours:
        return f"{key}: unknown key {where}; here it is called {ours}"
    valid = valid_keys()
    same_name = [name for name in valid if name.rpartition(".")[2] == last]
    close = same_name or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(last, [v.rpartition(".")[2] for v in valid], n=1)
    cure = f"did you mean {close[0]}?" if close else "see the README for the list of keys"
    return f"{key}: unknown key {where}; {cure}"

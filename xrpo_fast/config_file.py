"""A TOML file, its preset and overrides -> Config, and errors that name the key and the cure.

    preset of the algorithm  <  config file  <  --section.key value

An unknown key is an error that names the nearest valid one, or ours where it is another trainer's.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xrpo_fast.config import Algorithm, Config, ConfigError, Section

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
    "lr": "optim.learning_rate",
    "actor_learning_rate": "optim.learning_rate",
    "max_grad_norm": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "lr_warmup_steps": "optim.warmup_steps",
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
OTHER_UNITS = {
    "num_iterations": ("optim.updates_per_step", "mini-batches per step, each used once"),
    "ppo_epochs": ("optim.updates_per_step", "mini-batches per step, each used once"),
    "ppo_mini_batch_size": ("optim.updates_per_step", "mini-batches per step, not their rows"),
    "warmup_ratio": ("optim.warmup_steps", "updates, not a share of them"),
    "per_device_train_batch_size": ("optim.micro_batch_tokens", "padded tokens, not rows"),
    "ppo_micro_batch_size_per_gpu": ("optim.micro_batch_tokens", "padded tokens, not rows"),
    "micro_train_batch_size": ("optim.micro_batch_tokens", "padded tokens, not rows"),
}
"""The nearest of ours to a key that counts something else, and what ours counts."""


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
        set_key(values, key, _parse(key, text))
    if not _get(values, "run.name"):
        set_key(values, "run.name", path.stem)
    return make_config(values)


def make_config(values: Mapping[str, Any]) -> Config:
    """Config from nested values, preset underneath; ConfigError names the key and the cure."""
    algorithm = values.get("algorithm", "xrpo")
    known = Algorithm.__args__
    if algorithm not in known:
        raise ConfigError(f"algorithm: expected one of {', '.join(known)}, got {algorithm!r}")
    preset = preset_values(algorithm)
    objective, usual = _get(values, "loss.objective"), preset["loss"]["objective"]
    if objective in known and objective != usual:
        # Another objective brings its own clip and scale along, and the usual one takes its with
        # it; what the algorithm adds to either stays, such as the weights of TreePO.
        leaving = preset_values(usual)["loss"]
        kept = {key: value for key, value in preset["loss"].items() if key not in leaving}
        preset["loss"] = kept | preset_values(objective)["loss"]
    try:
        return Config.model_validate(_merge(preset, values))
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
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _parse(key: str, text: str) -> Any:
    """A command-line value as TOML would read it; texts and paths as they are."""
    section, _, last = key.rpartition(".")
    model = Config.model_fields[section].annotation if section in Config.model_fields else Config
    field = model.model_fields.get(last) if isinstance(model, type) else None
    if field is not None and field.annotation in (str, Path) and text[:1] not in ("'", '"'):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Set section.key in nested tables."""
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
    if item["type"] == "list_type":
        got = item["input"]
        return f"{key}: expected a list, got {got!r}; write {json.dumps([got], default=str)}"
    expected = re.sub(r"^(Input should be|\w+ should have) ", "", item["msg"])
    return f"{key}: expected {expected}, got {item['input']!r}"


def _unknown_key_message(key: str) -> str:
    section, _, last = key.rpartition(".")
    where = f"in section [{section}]" if section else "at the top level"
    ours = FOREIGN_KEYS.get(key) or FOREIGN_KEYS.get(last)
    if ours:
        return f"{key}: unknown key {where}; here it is called {ours}"
    if last in OTHER_UNITS:
        nearest, unit = OTHER_UNITS[last]
        return f"{key}: unknown key {where}; the nearest here is {nearest} ({unit})"
    valid = valid_keys()
    same_name = [name for name in valid if name.rpartition(".")[2] == last]
    close = same_name or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(last, [v.rpartition(".")[2] for v in valid], n=1)
    cure = f"did you mean {close[0]}?" if close else "xrpo_fast/config.py lists the keys"
    return f"{key}: unknown key {where}; {cure}"

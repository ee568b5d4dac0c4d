"""--dry-run: everything that can be checked without training, as findings in text."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from xrpo_fast.assemble import (
    check_streaming,
    choose_device,
    make_exemplars,
    make_planner,
    model_length,
    position_limit,
)
from xrpo_fast.config import Config
from xrpo_fast.inputs import load_eval_sets, load_training_prompts, make_template, start_verifier
from xrpo_fast.metrics import check_trackers
from xrpo_fast.policy import ModelError, architecture_path


def check(config: Config) -> list[str]:
    """What --dry-run checks: model, template, data, rewards, memory. Findings as text."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = architecture_path(config.model.path)
    options = {"trust_remote_code": config.model.trust_remote_code}
    choose_device(config.run.device)
    check_streaming(config)
    check_trackers(config.log.trackers)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(path, **options), **options
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path: expected a Hugging Face model folder or id with a tokenizer, got "
            f"{config.model.path!r}: {error}"
        ) from None
    check_weights(Path(path))
    verifier = start_verifier(config)
    verifier.close()
    template = make_template(config, tokenizer, verifier)
    prompts = load_training_prompts(config, template)
    eval_sets = load_eval_sets(config, template)
    length = model_length(
        config, position_limit(model.config), [prompts.prompts, *eval_sets.values()]
    )
    make_planner(config, len(prompts))
    make_exemplars(config, prompts, eval_sets)
    per_step = min(config.rollout.prompts_per_step, len(prompts))
    starts_few = config.planner.allocation == "dapo"
    num_first = max(1, per_step // (config.planner.rounds + 1)) if starts_few else per_step
    parameters = sum(p.numel() for p in model.parameters())
    # float32 weights, gradients and the two moments of AdamW.
    trainer_gib = parameters * 16 / 2**30
    return [
        f"model: {config.model.path}, {parameters:,} parameters; weights, gradients and AdamW take "
        f"{trainer_gib:.2f} GiB, activations and the engine come on top",
        f"data: {len(prompts)} prompts, {prompts.dropped_overlong} over-long left out; held out: "
        + (", ".join(f"{name} {len(found)}" for name, found in eval_sets.items()) or "none"),
        f"rollouts: {round(per_step * config.rollout.rollouts_per_prompt)} per step, "
        f"{config.base_rollouts} for each of {num_first} prompts at first; prompt and response "
        f"of up to {length} tokens",
    ]


def check_weights(folder: Path) -> None:
    """Whether a local folder's weights are whole, by their headers: nothing is loaded."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"model.path: expected whole weights in {path}, got {error}; copy or download the "
                "model again"
            ) from None

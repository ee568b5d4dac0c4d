"""A run of the built-in task small enough for tests: seconds, not minutes."""

from pathlib import Path

SMALL = {
    "run.steps": "4",
    "rollout.prompts_per_step": "12",
    "rollout.rollouts_per_prompt": "6",
    "planner.base_rollouts": "3",
    "eval.every_steps": "2",
    "eval.samples": "1",
    "eval.final_samples": "2",
    "eval.max_prompts": "6",
    "eval.k": "[1]",
    "checkpoint.every_steps": "2",
}

MADE_OF_THREE = ("3", "3.0", r"\frac{6}{2}", "1+2", r"\sqrt{9}", "+3", "03", "3.00")
"""Ways to write 3 that the tiny model has a token for."""

CONFIG = Path(__file__).parent.parent / "examples" / "quickstart.toml"


def small_arguments(output_dir: Path, *flags: str, **changes: str) -> list[str]:
    """Command-line arguments of train; changes use section__key=value."""
    values = SMALL | {"run.output_dir": str(output_dir)}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    overrides = [word for key, value in values.items() for word in (f"--{key}", value)]
    return [str(CONFIG), *overrides, *flags]


def comparable(rows: list[dict]) -> list[dict]:
    """Rows without what depends on the machine's state: seconds and memory."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "memory/"))} for row in rows
    ]


def parity_reward(
    prompts: list, completions: list, completion_ids: list | None = None, **columns: object
) -> list[float]:
    """A reward that a random model gets about half of the time."""
    assert completion_ids is not None
    return [float(sum(ids) % 2) for ids in completion_ids]


def make_tiny_model(folder: Path, architecture: str) -> Path:
    """A random model of the named architecture (llama, qwen3) with a chat template, saved.

    Some of its tokens are boxed numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    boxes = [f"\\boxed{{{x}}}" for x in (*MADE_OF_THREE, 4, 5)]
    words = ["<unk>", "<|end|>", "<|user|>", "<|bot|>", *boxes, *(f"w{i}" for i in range(114))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|end|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{% endif %}"
    )
    torch.manual_seed(0)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[architecture]
    config = config_class(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def slow_parity_reward(prompts: list, completions: list, **columns: object) -> list[float]:
    """parity_reward that takes 20 ms per rollout without using the processor."""
    import time

    time.sleep(0.02 * len(completions))
    return parity_reward(prompts, completions, **columns)  # pyright: ignore[reportArgumentType]

"""Our step against TRL's GRPOTrainer on the CPU: same model, prompts, rewards; steps alternate.

    python -m benchmarks.against_trl [--steps 9] [--threads 2] [--json FILE]

Llama of 2.75M parameters (hidden 256, 4 layers, vocabulary 512), 16 prompts x 16 rollouts of at
most 32 tokens, transformers generation, float32, no gradient checkpointing, GRPO, one update per
step. Two rewards: one that gives every group signal, one that gives none to half of the groups.
Needs the extra: pip install -e '.[trl]'
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NUM_PROMPTS, NUM_ROLLOUTS, MAX_TOKENS, VOCAB = 16, 16, 32, 512
PROMPT_TOKENS = 16
WARMUP_STEPS = 2


def reward_all(prompts, completions, completion_ids=None, **columns) -> list[float]:
    """Differs between the responses of every prompt."""
    return [sum(ids) % 7 / 6 for ids in completion_ids]


def reward_half(prompts, completions, completion_ids=None, **columns) -> list[float]:
    """As reward_all for half of the prompts; 0 for every response of the others."""
    return [
        sum(ids) % 7 / 6 if int(number) % 2 else 0.0
        for ids, number in zip(completion_ids, columns["number"], strict=True)
    ]


def make_model(folder: Path) -> None:
    """A random Llama and a word-level tokenizer, saved in Hugging Face format."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {f"w{i}": i for i in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w0", eos_token="w1", pad_token="w2"
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=2,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_rows() -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
    return [
        {"prompt": " ".join(f"w{i}" for i in row), "answer": "", "number": str(number)}
        for number, row in enumerate(ids.tolist())
    ]


def our_step(model: Path, data: Path, reward: str) -> Callable[[], object]:
    """Our trainer's step on this model and data."""
    from xrpo_fast.assemble import assemble
    from xrpo_fast.config_file import make_config

    config = make_config(
        {
            "algorithm": "grpo",
            "model": {"path": str(model), "compute_dtype": "float32"},
            "data": {"train": str(data), "template": "raw"},
            "rollout": {
                "engine": "transformers",
                "prompts_per_step": NUM_PROMPTS,
                "rollouts_per_prompt": NUM_ROLLOUTS,
                "max_response_tokens": MAX_TOKENS,
            },
            "reward": {"functions": [f"{__name__}:{reward}"], "workers": 0},
            "optim": {"learning_rate": 1e-6},
        }
    )
    return assemble(config).trainer.step


def run_pair(reward: str, num_steps: int) -> dict[str, list[float]]:
    """Seconds of alternating steps, ours and TRL's."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        rows = make_rows()
        data = folder / "train.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        step = our_step(folder / "model", data, reward)

        class Alternate(TrainerCallback):
            """Times TRL's step, then runs and times ours before TRL's next one."""

            def on_step_begin(self, *arguments: Any, **named: Any) -> None:
                self.start = time.perf_counter()

            def on_step_end(self, *arguments: Any, **named: Any) -> None:
                seconds["trl"].append(time.perf_counter() - self.start)
                start = time.perf_counter()
                step()
                seconds["ours"].append(time.perf_counter() - start)

        GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=globals()[reward],
            train_dataset=Dataset.from_list(rows),
            callbacks=[Alternate()],
            args=GRPOConfig(
                output_dir=str(folder / "trl"),
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=NUM_PROMPTS * NUM_ROLLOUTS,
                num_generations=NUM_ROLLOUTS,
                max_completion_length=MAX_TOKENS,
                loss_type="grpo",
                beta=0.0,
                learning_rate=1e-6,
                max_steps=WARMUP_STEPS + num_steps,
                logging_steps=10**6,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                model_init_kwargs={"dtype": "float32"},
            ),
        ).train()
    return {name: values[WARMUP_STEPS:] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    results = {}
    print(f"{'signal':<16}{'ours s':>10}{'TRL s':>10}{'ratio':>8}   (medians of alternating steps)")
    for label, reward in (("all groups", "reward_all"), ("half of them", "reward_half")):
        seconds = run_pair(reward, options.steps)
        ratios = [a / b for a, b in zip(seconds["ours"], seconds["trl"], strict=True)]
        ours, trl = (statistics.median(seconds[name]) for name in ("ours", "trl"))
        print(f"{label:<16}{ours:>10.2f}{trl:>10.2f}{statistics.median(ratios):>8.2f}")
        results[label] = {**seconds, "median_ratio": statistics.median(ratios)}
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, **results}, indent=1))


if __name__ == "__main__":
    main()

"""How often a policy solves each tier of a world, zero-shot and behind worked examples."""

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from xrpo_fast.tasks.symbols import World, load, parse_question, seeded_prompt, verify

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MAX_RESPONSE_TOKENS = 36


def worked_examples(world: World, question: str, num_exemplars: int) -> list[tuple[str, str]]:
    """Right answers to training questions that share the question's hidden code.

    Single-code questions come before chains; never the question itself.
    """
    wanted = set(parse_question(question)[0])
    hidden = wanted & {code for tier in ("hard", "vhard") for (code,) in world.codes[tier]}
    wanted = hidden or wanted
    similar = [
        asked
        for _, asked in world.questions["train"]
        if asked != question and wanted & set(parse_question(asked)[0])
    ]
    similar.sort(key=len)
    return [(asked, world.gold(asked)) for asked in similar[:num_exemplars]]


def sample_responses(
    model: "LlamaForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    prompts: list[str],
    *,
    num_samples: int,
    seed: int,
) -> list[list[str]]:
    """num_samples responses to each prompt at temperature 1, their end symbols included."""
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        # transformers declares generate where pyright does not find it.
        rows = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            **encoded,
            do_sample=True,
            top_k=0,
            num_return_sequences=num_samples,
            max_new_tokens=MAX_RESPONSE_TOKENS,
        )
    made = tokenizer.batch_decode(rows[:, encoded["input_ids"].shape[1] :])
    texts = [text.replace("<pad>", "") for text in made]
    return [texts[i : i + num_samples] for i in range(0, len(texts), num_samples)]


def tier_pass_rates(
    model: "LlamaForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    world: World,
    *,
    num_exemplars: int = 0,
    num_samples: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """tier -> share of right responses to the held-out questions."""
    records = load(world.seed, "test")
    prompts = [
        seeded_prompt(r["question"], worked_examples(world, r["question"], num_exemplars))
        for r in records
    ]
    responses = sample_responses(model, tokenizer, prompts, num_samples=num_samples, seed=seed)
    outcomes = defaultdict(list)
    for record, texts in zip(records, responses, strict=True):
        outcomes[record["tier"]] += [verify(text, record["answer"]) for text in texts]
    return {tier: sum(right) / len(right) for tier, right in sorted(outcomes.items())}

"""What a batch of rollouts costs: our decode loop, transformers' generate, and vLLM.

    pytest benchmarks/bench_rollouts.py --benchmark-only     32 prompts x 8 rollouts
    XRPO_BENCH_QUICK=1 pytest ...                            8 prompts x 4 rollouts

The built-in policy on its own prompts, at most 36 tokens, temperature 1. generate also returns the
log-probs of its tokens, as the trainer needs them. On a busy machine add
--benchmark-timer=time.process_time: processor seconds of all threads.
extra_info: tokens per round and per second; the providers sample different tokens.
"""

import os

import pytest
import torch

from xrpo_fast.rollouts import max_logprob_gap
from xrpo_fast.rollouts.transformers import TransformersEngine
from xrpo_fast.tasks import symbols
from xrpo_fast.tasks.policy import POLICY_DIR
from xrpo_fast.types import Request, Sampling

IS_QUICK = os.environ.get("XRPO_BENCH_QUICK") == "1"
NUM_PROMPTS, NUM_ROLLOUTS = (8, 4) if IS_QUICK else (32, 8)
ROUNDS = 3 if IS_QUICK else 15
MAX_TOKENS = 36


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(POLICY_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(POLICY_DIR)


@pytest.fixture(scope="module")
def sampling(tokenizer):
    return Sampling(temperature=1.0, eos_token_ids=frozenset({tokenizer.eos_token_id}))


@pytest.fixture(scope="module")
def requests(tokenizer):
    prompts = [tokenizer(record["question"])["input_ids"] for record in symbols.load()]
    return [
        Request(
            id=NUM_ROLLOUTS * group + sample_index,
            group=group,
            sample_index=sample_index,
            prompt_ids=tuple(prompts[group]),
            seed=NUM_ROLLOUTS * group + sample_index,
            max_tokens=MAX_TOKENS,
        )
        for group in range(NUM_PROMPTS)
        for sample_index in range(NUM_ROLLOUTS)
    ]


def run_engine(engine, requests):
    engine.submit(requests)
    done = []
    while len(done) < len(requests):
        done += engine.step()
    return done


def measure(benchmark, run, num_tokens):
    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=2)
    benchmark.extra_info["num_tokens"] = num_tokens
    if benchmark.stats:
        benchmark.extra_info["tokens_per_s"] = num_tokens / benchmark.stats["median"]
    benchmark.extra_info["num_threads"] = torch.get_num_threads()
    benchmark.extra_info["torch"] = torch.__version__


def test_ours(benchmark, model, tokenizer, sampling, requests):
    engine = TransformersEngine(
        model, sampling, max_slots=len(requests), pad_token_id=tokenizer.pad_token_id or 0
    )
    completions = run_engine(engine, requests)
    assert max_logprob_gap(completions, model, sampling.temperature) < 1e-5
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    measure(benchmark, lambda: run_engine(engine, requests), num_tokens)


def test_generate(benchmark, model, tokenizer, sampling, requests):
    width = max(len(request.prompt_ids) for request in requests)
    pad = tokenizer.pad_token_id or 0
    pads = [width - len(request.prompt_ids) for request in requests]
    ids = torch.tensor(
        [[pad] * n + list(r.prompt_ids) for n, r in zip(pads, requests, strict=True)]
    )
    mask = (torch.arange(width)[None] >= torch.tensor(pads)[:, None]).long()

    def run():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=MAX_TOKENS,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            top_p=1.0,
            eos_token_id=sorted(sampling.eos_token_ids),
            pad_token_id=pad,
            output_scores=True,
            return_dict_in_generate=True,
        )
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        return out.sequences[:, width:]

    tokens = run()
    is_eos = torch.isin(tokens, torch.tensor(sorted(sampling.eos_token_ids)))
    # A row's tokens up to and with its first EOS.
    num_tokens = int((is_eos.cumsum(1) - is_eos.long() == 0).sum())
    measure(benchmark, run, num_tokens)


def test_vllm(benchmark, model, sampling, requests, require):
    require("vllm")
    from xrpo_fast.rollouts.vllm import VllmEngine

    engine = VllmEngine(
        str(POLICY_DIR),
        sampling,
        max_slots=len(requests),
        max_model_len=128,
        dtype=torch.float32,
    )
    try:
        completions = run_engine(engine, requests)
        assert max_logprob_gap(completions, model, sampling.temperature) < 1e-4
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        measure(benchmark, lambda: run_engine(engine, requests), num_tokens)
        benchmark.extra_info["engine_steps"] = engine.num_steps()
    finally:
        engine.close()

"""What barriers cost: streaming against the paper's three phases, equal rollouts, equal lengths.

    pytest benchmarks/bench_makespan.py --benchmark-only
    XRPO_BENCH_QUICK=1 pytest ...        leaves out vLLM

192 rollouts (24 prompts, base 4, mean 8) on 32 slots; a rollout's length is log-normal and belongs
to (prompt, sample), as does its reward. `slots` decodes one token a step for each rollout and
nothing else; `vllm` is the real engine with a tiny Llama. extra_info: engine_steps, free of noise.
Asserted: streaming needs at most 0.7x the engine steps of the phases.
"""

import os

import numpy as np
import pytest

from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.types import Completion, Request, Sampling

NUM_PROMPTS, BASE, MEAN, NUM_SLOTS = 24, 4, 8, 32
TOTAL = NUM_PROMPTS * MEAN
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 40, 0.8, 320

IS_QUICK = os.environ.get("XRPO_BENCH_QUICK") == "1"
ENGINES = ["slots"] if IS_QUICK else ["slots", "vllm"]


class SlotEngine:
    """Continuous batching reduced to its slots."""

    def __init__(self):
        self.waiting, self.running, self.steps = [], {}, 0

    def submit(self, requests):
        self.waiting += requests

    def step(self):
        while self.waiting and len(self.running) < NUM_SLOTS:
            request = self.waiting.pop(0)
            self.running[request.id] = [request, request.max_tokens]
        self.steps += 1
        done = []
        for slot in list(self.running.values()):
            slot[1] -= 1
            if slot[1] == 0:
                del self.running[slot[0].id]
                done.append(
                    Completion(
                        request=slot[0],
                        token_ids=(1,) * slot[0].max_tokens,
                        logprobs=np.zeros(slot[0].max_tokens, np.float32),
                        finish_reason="length",
                    )
                )
        return done

    def free_slots(self):
        return NUM_SLOTS - len(self.running) - len(self.waiting)

    def num_steps(self):
        return self.steps

    def close(self):
        pass


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tmp_path_factory):
    if request.param == "slots":
        engine = SlotEngine()
    else:
        pytest.importorskip("vllm")
        engine = vllm_engine(tmp_path_factory.mktemp("model"))
    yield engine
    engine.close()


def vllm_engine(folder):
    import torch
    import transformers

    from xrpo_fast.rollouts.vllm import VllmEngine

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return VllmEngine(
        str(folder),
        Sampling(temperature=1.0, eos_token_ids=frozenset()),
        max_slots=NUM_SLOTS,
        max_model_len=512,
        dtype=torch.float32,
        gpu_memory_fraction=0.1,
    )


class Work:
    """Requests whose length and reward are fixed by (prompt, sample)."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        tokens = rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, (NUM_PROMPTS, TOTAL))
        self.lengths = np.clip(tokens, 1, MOST_TOKENS).astype(int)
        rates = rng.beta(0.6, 0.6, (NUM_PROMPTS, 1))
        self.rewards = (rng.random((NUM_PROMPTS, TOTAL)) < rates).astype(float)
        self.num_given = np.zeros(NUM_PROMPTS, int)
        self.next_id = 0

    def request(self, prompt):
        sample = int(self.num_given[prompt])
        self.num_given[prompt] += 1
        self.next_id += 1
        return Request(
            id=self.next_id,
            group=int(prompt),
            sample_index=sample,
            prompt_ids=(1, 2, 3, 4),
            seed=self.next_id,
            max_tokens=int(self.lengths[prompt, sample]),
        )

    def reward(self, completion):
        return self.rewards[completion.request.group, completion.request.sample_index]


def planner_for(allocation):
    return RolloutPlanner(
        NUM_PROMPTS, total_rollouts=TOTAL, base_rollouts=BASE, allocation=allocation
    )


def in_phases(engine, seed):
    work, planner = Work(seed), planner_for("proportional")
    while not planner.is_done:
        prompts = np.repeat(np.arange(NUM_PROMPTS), planner.plan_round())
        engine.submit([work.request(prompt) for prompt in prompts])
        num_out = len(prompts)
        while num_out:
            for done in engine.step():
                num_out -= 1
                planner.observe_one(done.request.group, work.reward(done))
    return planner


def streaming(engine, seed):
    work, planner = Work(seed), planner_for("streaming")
    num_out = 0
    while True:
        prompts = planner.next_prompts(engine.free_slots())
        engine.submit([work.request(prompt) for prompt in prompts])
        num_out += len(prompts)
        if num_out == 0:
            return planner
        for done in engine.step():
            num_out -= 1
            planner.observe_one(done.request.group, work.reward(done))


steps_of = {}


@pytest.mark.parametrize("schedule", [in_phases, streaming], ids=["phases", "streaming"])
def test_makespan(benchmark, engine, schedule):
    seeds = iter(range(100))
    steps = []

    def run():
        before = engine.num_steps()
        planner = schedule(engine, next(seeds))
        steps.append(engine.num_steps() - before)
        return planner

    planner = benchmark.pedantic(run, rounds=5)
    assert planner.counts.sum() == TOTAL
    benchmark.extra_info.update(engine=type(engine).__name__, engine_steps=steps)
    steps_of[type(engine).__name__, schedule] = steps
    phases = steps_of.get((type(engine).__name__, in_phases), [])
    if schedule is streaming and phases:  # the same five seeds
        assert len(phases) == len(steps)
        assert np.mean(steps) <= 0.7 * np.mean(phases), (steps, phases)

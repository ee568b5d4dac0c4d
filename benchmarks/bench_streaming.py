"""Makespan of one step: streaming against the paper's three phases, at equal rollouts.

Response lengths are log-normal (median 24 tokens, 1 to 256), 192 rollouts on 32 slots, 24 prompts.
Engine steps are counted by a simulation of the slots and by real vLLM on a tiny Llama; vLLM is also
timed. The loop is the trainer's own, schedule.Collector.

    pytest benchmarks/bench_streaming.py --benchmark-only
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.small_run import make_tiny_model
from xrpo_fast.metrics import Clock
from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.schedule import Collector
from xrpo_fast.types import Completion, Engine, Prompt, Request, Verdict

NUM_PROMPTS, NUM_ROLLOUTS, NUM_SLOTS = 24, 192, 32
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 24, 1.0, 256
IS_QUICK = bool(os.environ.get("XRPO_BENCH_QUICK"))
NUM_STEPS = 2 if IS_QUICK else 7
MAX_STEP_RATIO = 0.7


def response_tokens(request: Request) -> int:
    """Log-normal length, fixed by the prompt and the sample: the same in every schedule."""
    rng = np.random.default_rng((request.group, request.sample_index))
    return int(np.clip(MEDIAN_TOKENS * np.exp(SPREAD * rng.standard_normal()), 1, MAX_TOKENS))


class GivenLengths:
    """An engine whose responses end at their given length; nothing else is changed."""

    is_streaming = True

    def __init__(self, engine: Engine, stretch: int = 1) -> None:
        self.engine = engine
        self.stretch = stretch
        self.num_slots = engine.num_slots
        self.requests: dict[int, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests.update({request.id: request for request in requests})
        self.engine.submit(
            [replace(r, max_tokens=self.stretch * response_tokens(r)) for r in requests]
        )

    def step(self) -> list[Completion]:
        return [replace(c, request=self.requests[c.request.id]) for c in self.engine.step()]

    def free_slots(self) -> int:
        return self.engine.free_slots()

    def num_steps(self) -> int:
        return self.engine.num_steps()


class SimulatedSlots:
    """One token per running request and step."""

    num_slots = NUM_SLOTS

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.left: dict[int, int] = {}
        self.running: dict[int, Request] = {}
        self.steps = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting.extend(requests)

    def step(self) -> list[Completion]:
        while self.waiting and len(self.running) < NUM_SLOTS:
            request = self.waiting.pop(0)
            self.running[request.id], self.left[request.id] = request, request.max_tokens
        self.steps += 1
        done = []
        for request_id in list(self.running):
            self.left[request_id] -= 1
            if self.left[request_id] == 0:
                request = self.running.pop(request_id)
                done.append(
                    Completion(
                        request=request,
                        token_ids=(0,) * request.max_tokens,
                        logprobs=np.zeros(request.max_tokens, np.float32),
                        finish_reason="length",
                    )
                )
        return done

    def free_slots(self) -> int:
        return NUM_SLOTS - len(self.running) - len(self.waiting)

    def num_steps(self) -> int:
        return self.steps


class ParityVerifier:
    """Reward by the prompt's pass rate, at once."""

    def __init__(self) -> None:
        self.done: list[tuple[int, Verdict]] = []

    def submit(self, key, prompt, text, token_ids, is_truncated) -> None:
        is_right = (key * 2654435761) % 997 < 997 * prompt.index / NUM_PROMPTS
        self.done.append((key, Verdict(reward=float(is_right), solved=is_right)))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Verdict]]:
        done, self.done = self.done, []
        return done


def make_collector(engine: GivenLengths, allocation: str) -> Collector:
    planner = RolloutPlanner(
        NUM_PROMPTS,
        total_rollouts=NUM_ROLLOUTS,
        base_rollouts=4,
        allocation=allocation,  # pyright: ignore[reportArgumentType]
    )
    return Collector(
        engine=engine,  # pyright: ignore[reportArgumentType]
        planner=planner,
        verifier=ParityVerifier(),  # pyright: ignore[reportArgumentType]
        decode=lambda ids: "",
        seeder=None,
        seed=0,
        max_response_tokens=MAX_TOKENS,
        clock=Clock(),
    )


def run_step(collector: Collector, engine: GivenLengths, step: int) -> tuple[int, float]:
    """(engine steps, seconds) of one collection; the budget is checked."""
    prompts = [
        Prompt(id=f"p{i}", index=i, question="", token_ids=(4 + i, 5, 6, 7), answer="")
        for i in range(NUM_PROMPTS)
    ]
    collector.planner.begin_step([prompt.id for prompt in prompts], step)
    before, start = engine.num_steps(), time.perf_counter()
    rollouts = collector.collect(step, prompts)
    assert len(rollouts) == NUM_ROLLOUTS
    return engine.num_steps() - before, time.perf_counter() - start


def compare(engine: GivenLengths, benchmark, label: str) -> None:
    """Alternate phases and streaming on one engine; ratios of steps and of seconds."""
    collectors = {name: make_collector(engine, name) for name in ("proportional", "streaming")}
    # Request ids are unique in the life of an engine, which the two share.
    collectors["streaming"]._next_request_id = 2**32
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in collectors}

    def pair() -> None:
        step = len(found["streaming"]) + 1
        for name, collector in collectors.items():
            found[name].append(run_step(collector, engine, step))

    benchmark.pedantic(pair, rounds=NUM_STEPS, warmup_rounds=1)
    kept = {name: values[1:] for name, values in found.items()}
    steps = {name: statistics.median(s for s, _ in values) for name, values in kept.items()}
    ratios = [b[1] / a[1] for a, b in zip(kept["proportional"], kept["streaming"], strict=True)]
    step_ratio = steps["streaming"] / steps["proportional"]
    benchmark.extra_info.update(
        {f"engine_steps_{name}": count for name, count in steps.items()}
        | {"step_ratio": step_ratio, "seconds_ratio_median": statistics.median(ratios)}
    )
    print(
        f"\n{label}: {steps['streaming']:.0f} engine steps streaming, "
        f"{steps['proportional']:.0f} in three phases, ratio {step_ratio:.2f}; "
        f"seconds ratio {statistics.median(ratios):.2f} (median of {len(ratios)} pairs)"
    )
    assert step_ratio <= MAX_STEP_RATIO


def test_simulated_slots(benchmark) -> None:
    compare(GivenLengths(SimulatedSlots()), benchmark, "simulation")  # pyright: ignore


def test_vllm_on_the_cpu(benchmark, tmp_path: Path, require) -> None:
    require("vllm")
    import torch

    from xrpo_fast.rollouts.vllm import VllmEngine
    from xrpo_fast.types import Sampling

    engine = VllmEngine(
        str(make_tiny_model(tmp_path / "model", "llama")),
        Sampling(temperature=1.0, eos_token_ids=frozenset()),
        max_slots=NUM_SLOTS,
        max_model_len=MAX_TOKENS + 16,
        dtype=torch.float32,
        gpu_memory_fraction=0.05,
    )
    try:
        compare(GivenLengths(engine), benchmark, "vLLM")
    finally:
        engine.close()

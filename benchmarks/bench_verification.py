"""Verification hides under generation: a streaming step on real vLLM with a reward that sleeps
20 ms per rollout in 4 workers, against one that is free.

800 rollouts of 100 prompts on 32 slots, with responses long enough for a step of ten seconds or
more. The workers do 200 rollouts a second at best: a step of four seconds could hide nothing.

    pytest benchmarks/bench_verification.py --benchmark-only
"""

import os
import statistics
import time
from pathlib import Path

from benchmarks.bench_streaming import MAX_TOKENS, NUM_SLOTS, GivenLengths
from tests.small_run import make_tiny_model
from xrpo_fast.metrics import Clock
from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.rewards import make_verifier
from xrpo_fast.schedule import Collector
from xrpo_fast.types import Prompt

IS_QUICK = bool(os.environ.get("XRPO_BENCH_QUICK"))
NUM_PROMPTS, NUM_ROLLOUTS, STRETCH = (25, 200, 1) if IS_QUICK else (100, 800, 4)
NUM_PAIRS = 1 if IS_QUICK else 5
REWARDS = {"free": "tests.small_run:parity_reward", "slow": "tests.small_run:slow_parity_reward"}


def test_verification_is_hidden(benchmark, tmp_path: Path, require) -> None:
    require("vllm")
    import torch

    from xrpo_fast.rollouts.vllm import VllmEngine
    from xrpo_fast.types import Sampling

    verifiers = {name: make_verifier([path], workers=4) for name, path in REWARDS.items()}
    engine = VllmEngine(
        str(make_tiny_model(tmp_path / "model", "llama")),
        Sampling(temperature=1.0, eos_token_ids=frozenset()),
        max_slots=NUM_SLOTS,
        max_model_len=STRETCH * MAX_TOKENS + 16,
        dtype=torch.float32,
        gpu_memory_fraction=0.05,
    )
    shared = GivenLengths(engine, STRETCH)
    prompts = [
        Prompt(id=f"p{i}", index=i, question="", token_ids=(4 + i, 5, 6, 7), answer="")
        for i in range(NUM_PROMPTS)
    ]
    seconds: dict[str, list[float]] = {name: [] for name in REWARDS}
    blocked: dict[str, list[float]] = {name: [] for name in REWARDS}
    next_id = 0

    def pair() -> None:
        nonlocal next_id
        for name, verifier in verifiers.items():
            planner = RolloutPlanner(
                NUM_PROMPTS,
                total_rollouts=NUM_ROLLOUTS,
                base_rollouts=4,
                allocation="streaming",
            )
            planner.begin_step([prompt.id for prompt in prompts], 1)
            clock = Clock()
            collector = Collector(
                engine=shared,  # pyright: ignore[reportArgumentType]
                planner=planner,
                verifier=verifier,
                decode=lambda ids: "",
                seeder=None,
                seed=0,
                max_response_tokens=STRETCH * MAX_TOKENS,
                clock=clock,
            )
            collector._next_request_id = next_id
            next_id += NUM_ROLLOUTS
            start = time.perf_counter()
            assert len(collector.collect(1, prompts)) == NUM_ROLLOUTS
            seconds[name].append(time.perf_counter() - start)
            blocked[name].append(clock.lap()["timing_s/verify"])

    try:
        benchmark.pedantic(pair, rounds=NUM_PAIRS, warmup_rounds=1)
    finally:
        engine.close()
        for verifier in verifiers.values():
            verifier.close()
    ratios = [b / a for a, b in zip(seconds["free"][1:], seconds["slow"][1:], strict=True)]
    benchmark.extra_info["ratio_median"] = statistics.median(ratios)
    for name in REWARDS:
        step_s = statistics.median(seconds[name][1:])
        verify_s = statistics.median(blocked[name][1:])
        print(f"\n{name} reward: step {step_s:.1f} s, of it verification {verify_s:.2f} s", end="")
    print(f"\nratio {statistics.median(ratios):.3f} (median of {len(ratios)} pairs)")

"""The collection loop: phases and streaming on a scripted engine with the engines' protocol."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from xrpo_fast.metrics import Clock
from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.schedule import Collector, barrier_idle_frac, request_seed
from xrpo_fast.types import Completion, Exemplar, Prompt, Request, Rollout, Verdict


@dataclass
class ScriptedEngine:
    """One token per running request and step; the script gives each request's length."""

    lengths: dict[int, int]
    num_slots: int = 8
    is_streaming: bool = True
    steps: int = 0
    running: list[tuple[Request, int]] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting.extend(requests)

    def step(self) -> list[Completion]:
        self.steps += 1
        while self.waiting and len(self.running) < self.num_slots:
            request = self.waiting.pop(0)
            self.running.append((request, self.steps + self._length(request)))
        done = [request for request, end in self.running if end <= self.steps + 1]
        self.running = [(r, end) for r, end in self.running if end > self.steps + 1]
        return [self._completion(request) for request in done]

    def free_slots(self) -> int:
        return self.num_slots - len(self.running) - len(self.waiting)

    def _length(self, request: Request) -> int:
        return self.lengths.get(request.group, 3) + request.seed % 3

    def _completion(self, request: Request) -> Completion:
        length = self._length(request)
        return Completion(
            request=request,
            token_ids=tuple(request.seed % 97 for _ in range(length)),
            logprobs=np.zeros(length, np.float32),
            finish_reason="stop",
        )


@dataclass
class ScriptedVerifier:
    """Success by the pass rate of the prompt; a verdict is ready `delay` polls after submission."""

    pass_rates: Sequence[float]
    delay: int = 0
    polls: int = 0
    waits: int = 0
    pending: list[tuple[int, int, Verdict]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def submit(self, key, prompt, text, token_ids, is_truncated) -> None:
        self.texts.append(text)
        is_right = (
            request_seed("verdict", prompt.id, key) % 1000 < 1000 * self.pass_rates[prompt.index]
        )
        verdict = Verdict(reward=float(is_right), solved=is_right)
        self.pending.append((self.polls + self.delay, key, verdict))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Verdict]]:
        self.polls += 1
        self.waits += timeout_s > 0
        ready = [(key, verdict) for due, key, verdict in self.pending if due < self.polls]
        self.pending = [item for item in self.pending if item[0] >= self.polls]
        return ready


def make_prompts(num: int) -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", index=i, question=f"q{i}", token_ids=(i + 1, 2), answer="")
        for i in range(num)
    ]


def collect(
    num_prompts: int = 6,
    total: int = 48,
    allocation: str = "proportional",
    delay: int = 0,
    seeder=None,
    pass_rates: Sequence[float] | None = None,
    lengths: dict[int, int] | None = None,
    max_response_tokens: int = 32,
    priors: dict[str, tuple[float, float]] | None = None,
) -> tuple[list[Rollout], ScriptedEngine, ScriptedVerifier]:
    prompts = make_prompts(num_prompts)
    planner = RolloutPlanner(
        num_prompts,
        total_rollouts=total,
        base_rollouts=total // num_prompts // 2,
        allocation=allocation,  # pyright: ignore[reportArgumentType]
        history=priors is not None,
    )
    planner.priors = priors or {}
    engine = ScriptedEngine(lengths or {})
    verifier = ScriptedVerifier(pass_rates or [i / num_prompts for i in range(num_prompts)], delay)
    collector = Collector(
        engine=engine,  # pyright: ignore[reportArgumentType]
        planner=planner,
        verifier=verifier,  # pyright: ignore[reportArgumentType]
        decode=lambda ids: " ".join(map(str, ids)),
        seeder=seeder,
        seed=0,
        max_response_tokens=max_response_tokens,
        clock=Clock(),
    )
    planner.begin_step([prompt.id for prompt in prompts], 1)
    return collector.collect(1, prompts), engine, verifier


@pytest.mark.parametrize("allocation", ["proportional", "greedy", "streaming", "uniform"])
def test_every_allocation_spends_the_budget_and_keeps_the_order(allocation: str) -> None:
    rollouts, engine, _ = collect(allocation=allocation)
    assert len(rollouts) == 48
    keys = [(r.completion.request.group, r.completion.request.sample_index) for r in rollouts]
    assert keys == sorted(keys)
    for group in range(6):
        samples = [sample for g, sample in keys if g == group]
        assert samples == list(range(len(samples)))
    assert sorted(r.finish_order for r in rollouts) == list(range(48))
    assert not engine.running
    assert not engine.waiting


def test_streaming_does_not_depend_on_when_verdicts_arrive() -> None:
    plans = []
    for delay in (0, 1, 5, 20):
        rollouts, engine, _ = collect(allocation="streaming", delay=delay)
        plans.append(([r.completion for r in rollouts], engine.steps))
    first, steps = plans[0]
    for other, other_steps in plans[1:]:
        assert [c.request for c in other] == [c.request for c in first]
        assert other_steps == steps


def test_streaming_waits_for_no_verdict_within_the_lag() -> None:
    waits = {}
    for lag, limit in ((8, 32), (32, 2048)):
        _, _, verifier = collect(
            allocation="streaming",
            delay=20,
            lengths=dict.fromkeys(range(6), 100),
            max_response_tokens=limit,
        )
        waits[lag] = verifier.waits
    # What finishes last has nothing to hide under.
    assert waits[32] <= 20 < waits[8]


def test_streaming_has_no_barriers() -> None:
    lengths = {0: 40, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2}
    _, phased, _ = collect(lengths=lengths)
    _, streamed, _ = collect(lengths=lengths, allocation="streaming")
    assert streamed.steps < 0.75 * phased.steps


def test_streaming_is_not_biased_against_long_answers() -> None:
    # Half of the prompts answer in 60 tokens, the others in 4; pass rates do not depend on it.
    num, share = 32, {}
    rates = [0.5] * num
    lengths = {i: 60 if i % 2 else 4 for i in range(num)}
    for allocation in ("greedy", "streaming"):
        counts = np.zeros(num)
        for repeat in range(4):
            shifted = {i: lengths[(i + repeat) % num] for i in range(num)}
            rollouts, _, _ = collect(num, num * 8, allocation, pass_rates=rates, lengths=shifted)
            for r in rollouts:
                counts[(r.completion.request.group + repeat) % num] += 1
        share[allocation] = counts[1::2].sum() / counts.sum()
    assert share["streaming"] == pytest.approx(share["greedy"], abs=0.05)


def test_only_hopeless_prompts_are_seeded_and_only_after_the_base() -> None:
    exemplar = Exemplar(prompt_id="x", question="q", response="r", num_tokens=1, step=0)
    asked = []

    def seeder(prompt: Prompt, step: int):
        asked.append(prompt.index)
        return (9, 9, *prompt.token_ids), (exemplar,)

    rollouts, _, _ = collect(seeder=seeder, pass_rates=[0, 0, 0, 1, 1, 1])
    seeded = [r for r in rollouts if r.is_seeded]
    assert {r.prompt.index for r in seeded} == {0, 1, 2}
    assert set(asked) == {0, 1, 2}
    assert all(r.round_index > 0 for r in seeded)
    assert all(r.completion.request.prompt_ids[:2] == (9, 9) for r in seeded)
    assert all(r.exemplars == (exemplar,) for r in seeded)
    assert all(r.is_seeded for r in rollouts if r.prompt.index < 3 and r.round_index > 0)


def test_a_prompt_of_one_base_rollout_is_seeded_from_the_second_on() -> None:
    exemplar = Exemplar(prompt_id="x", question="q", response="r", num_tokens=1, step=0)
    rollouts, _, _ = collect(
        2,
        16,
        "streaming",
        seeder=lambda prompt, step: ((9, *prompt.token_ids), (exemplar,)),
        pass_rates=[0, 0],
        priors={"p0": (3.0, 9.0), "p1": (0.5, 0.5)},
    )
    base = {0: 1, 1: 4}
    for rollout in rollouts:
        is_extra = rollout.completion.request.sample_index >= base[rollout.prompt.index]
        assert rollout.is_seeded == is_extra
        assert rollout.round_index == is_extra


def test_no_suitable_exemplar_leaves_the_prompt_as_it_is() -> None:
    rollouts, _, _ = collect(seeder=lambda prompt, step: None, pass_rates=[0] * 6)
    assert not any(r.is_seeded for r in rollouts)
    assert all(r.completion.request.prompt_ids == r.prompt.token_ids for r in rollouts)


def test_request_seeds_differ_by_every_part_and_stay_the_same() -> None:
    seeds = {
        request_seed(seed, step, prompt, sample)
        for seed in range(3)
        for step in range(3)
        for prompt in ("a", "b", "1")
        for sample in range(3)
    }
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(0, 1, "p", 2) == 2342095204336180195


def test_barrier_idle_frac_is_the_share_of_slots_that_wait() -> None:
    assert barrier_idle_frac([4, 4, 4]) == 0
    assert barrier_idle_frac([1, 2, 3, 10]) == pytest.approx(0.6)
    assert barrier_idle_frac([]) == 0
    assert barrier_idle_frac([0, 0]) == 0

"""Who is rolled out next: plan, submit, collect, verify, observe; in phases or streaming.

Phases wait for the last rollout of each round. Streaming refills a slot the moment it frees: the
reward of a finished rollout is committed to the planner a fixed number of engine steps later, so
that verification hides under generation and one seed still gives one run.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from xrpo_fast.metrics import Clock
from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.rewards import Verifier
from xrpo_fast.types import Completion, Engine, Exemplar, Prompt, Request, Rollout, Verdict

MIN_COMMIT_LAG_STEPS = 8
COMMIT_LAG_FRAC = 1 / 64
"""Engine steps between the end of a rollout and the planner's knowledge of its reward, as a share
of the longest response: 8192 tokens give 128 steps, 3 s at the step time of a small GPU model, more
than most verifications take. A prompt's extra rollouts wait as long, so it is a small share."""

POLL_TIMEOUT_S = 0.05

SeededPrompt = tuple[tuple[int, ...], tuple[Exemplar, ...]]
Seeder = Callable[[Prompt, int], "SeededPrompt | None"]
"""(prompt, step) -> the seeded prompt's ids and its exemplars; None where none is suitable."""


def request_seed(*parts: int | str) -> int:
    """63-bit hash of (seed, step, prompt id, sample index): the same on every machine."""
    text = "\0".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(kw_only=True, slots=True)
class _Step:
    """What is known of the step under way."""

    index: int
    prompts: Sequence[Prompt]
    next_sample: list[int]
    num_solved: list[int]
    num_finished: list[int]
    round_index: int = 0
    num_running: int = 0
    completions: dict[int, Completion] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    exemplars: dict[int, tuple[Exemplar, ...]] = field(default_factory=dict)
    finish_order: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Collector:
    """Rolls out one step's prompts and returns every rollout with its verdict.

    Args:
        decode: token ids -> text, called once per completion.
        seeder: worked examples for a hopeless prompt; None turns seeding off.
    """

    engine: Engine
    planner: RolloutPlanner
    verifier: Verifier
    decode: Callable[[Sequence[int]], str]
    seeder: Seeder | None
    seed: int
    max_response_tokens: int
    clock: Clock
    _next_request_id: int = field(default=0, init=False)

    def collect(self, step: int, prompts: Sequence[Prompt]) -> list[Rollout]:
        """All rollouts of the step, ordered by prompt and sample index."""
        num = len(prompts)
        run = _Step(
            index=step,
            prompts=prompts,
            next_sample=[0] * num,
            num_solved=[0] * num,
            num_finished=[0] * num,
        )
        if self._is_streaming:
            self._run_streaming(run)
        else:
            self._run_phases(run)
        return self._rollouts(run)

    @property
    def _is_streaming(self) -> bool:
        return self.planner.allocation == "streaming"

    def _run_phases(self, run: _Step) -> None:
        while not self.planner.is_done:
            with self.clock("plan"):
                counts = self.planner.plan_round()
            requests = [
                self._request(run, group)
                for group, count in enumerate(counts)
                for _ in range(count)
            ]
            self._submit(run, requests)
            waiting = {request.id for request in requests}
            while waiting - run.completions.keys():
                self._advance(run)
            self._await_verdicts(run, waiting)
            with self.clock("plan"):
                groups = [request.group for request in requests]
                rewards = [run.verdicts[request.id].reward for request in requests]
                seeded = [request.is_seeded for request in requests]
                self.planner.observe(groups, rewards, is_seeded=seeded)
            for request in requests:
                self._count(run, request)
            run.round_index += 1

    def _run_streaming(self, run: _Step) -> None:
        lag = max(MIN_COMMIT_LAG_STEPS, int(COMMIT_LAG_FRAC * self.max_response_tokens))
        due: deque[tuple[int, int]] = deque()
        tick = 0
        while True:
            with self.clock("plan"):
                groups = self.planner.next_prompts(self.engine.free_slots())
            requests = [self._request(run, group) for group in groups]
            self._submit(run, requests)
            if run.num_running == 0 and not due:
                return
            finished = self._advance(run) if run.num_running else []
            tick += 1
            due.extend((tick + lag, request_id) for request_id in finished)
            # With nothing running there is nothing to hide the lag under.
            while due and (due[0][0] <= tick or run.num_running == 0):
                _, request_id = due.popleft()
                self._await_verdicts(run, {request_id})
                request = run.completions[request_id].request
                with self.clock("plan"):
                    reward = run.verdicts[request_id].reward
                    self.planner.observe_one(request.group, reward, is_seeded=request.is_seeded)
                self._count(run, request)

    def _request(self, run: _Step, group: int) -> Request:
        """The next rollout of a prompt: seeded where all its finished ones failed."""
        prompt = run.prompts[group]
        sample_index = run.next_sample[group]
        run.next_sample[group] += 1
        prompt_ids, exemplars = prompt.token_ids, ()
        is_extra = sample_index >= self.planner.base_of(group)
        is_hopeless = run.num_finished[group] > 0 and run.num_solved[group] == 0
        if self.seeder is not None and is_hopeless and (is_extra or not self._is_streaming):
            with self.clock("retrieve"):
                seeded = self.seeder(prompt, run.index)
            if seeded is not None:
                prompt_ids, exemplars = seeded
        request = Request(
            id=self._next_request_id,
            group=group,
            sample_index=sample_index,
            prompt_ids=prompt_ids,
            seed=request_seed(self.seed, run.index, prompt.id, sample_index),
            max_tokens=self.max_response_tokens,
            is_seeded=bool(exemplars),
        )
        self._next_request_id += 1
        run.rounds[request.id] = int(is_extra) if self._is_streaming else run.round_index
        run.exemplars[request.id] = exemplars
        return request

    def _submit(self, run: _Step, requests: list[Request]) -> None:
        if requests:
            run.num_running += len(requests)
            with self.clock("generate"):
                self.engine.submit(requests)

    def _advance(self, run: _Step) -> list[int]:
        """One engine step; hands what finished to the verifier. Ids that finished."""
        completions = timed_step(self.engine, run.num_running, self.clock)
        run.num_running -= len(completions)
        with self.clock("verify"):
            for completion in completions:
                request = completion.request
                run.completions[request.id] = completion
                run.finish_order.append(request.id)
                text = self.decode(completion.token_ids)
                run.texts[request.id] = text
                self.verifier.submit(
                    request.id,
                    run.prompts[request.group],
                    text,
                    completion.token_ids,
                    completion.finish_reason == "length",
                )
            run.verdicts.update(self.verifier.poll())
        return [completion.request.id for completion in completions]

    def _await_verdicts(self, run: _Step, ids: set[int]) -> None:
        with self.clock("verify"):
            while ids - run.verdicts.keys():
                run.verdicts.update(self.verifier.poll(POLL_TIMEOUT_S))

    def _count(self, run: _Step, request: Request) -> None:
        run.num_finished[request.group] += 1
        run.num_solved[request.group] += run.verdicts[request.id].solved

    def _rollouts(self, run: _Step) -> list[Rollout]:
        order = {request_id: i for i, request_id in enumerate(run.finish_order)}
        ids = sorted(
            run.completions,
            key=lambda i: (
                run.completions[i].request.group,
                run.completions[i].request.sample_index,
            ),
        )
        return [
            Rollout(
                prompt=run.prompts[run.completions[i].request.group],
                completion=run.completions[i],
                text=run.texts[i],
                verdict=run.verdicts[i],
                exemplars=run.exemplars[i],
                round_index=run.rounds[i],
                finish_order=order[i],
            )
            for i in ids
        ]


def timed_step(engine: Engine, num_running: int, clock: Clock) -> list[Completion]:
    """One engine step; its seconds go to generation, but for the share of slots that stood idle."""
    start = time.perf_counter()
    completions = engine.step()
    seconds = time.perf_counter() - start
    if engine.is_streaming:
        idle_frac = 1.0 - min(num_running, engine.num_slots) / engine.num_slots
    else:
        idle_frac = barrier_idle_frac([len(completion.token_ids) for completion in completions])
    clock.add("generate", seconds * (1.0 - idle_frac))
    clock.add("barrier_idle", seconds * idle_frac)
    return completions


def barrier_idle_frac(lengths: Sequence[int]) -> float:
    """Share of a batch's slot time spent waiting for its longest rollout: 1 - mean / max length."""
    if not len(lengths) or max(lengths) == 0:
        return 0.0
    return 1.0 - float(np.mean(lengths)) / max(lengths)

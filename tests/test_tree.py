"""Trees of shared segments on a scripted engine: branching, ends, fall-back, order, tokens."""

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrpo_fast.branching import MAX_REPEATS, REPEATED_CHARS, Tree, is_repetitive
from xrpo_fast.config import TreeConfig
from xrpo_fast.metrics import Clock
from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.schedule import request_seed
from xrpo_fast.step_metrics import rollout_metrics
from xrpo_fast.tree import TreeCollector
from xrpo_fast.types import Completion, Prompt, Request, Rollout, Verdict

EOS = 1
SEGMENT_TOKENS = 4


@dataclass
class ShuffledEngine:
    """Random tokens that depend on the request's seed alone; answers in an order of its own.

    A step returns some of the running requests, or all where `is_streaming` is false.
    """

    eos_rate: float = 0.1
    order: int = 0
    is_streaming: bool = True
    num_slots: int = 1000
    answers: dict[tuple[int, int], Completion] = field(default_factory=dict)
    """By (group, number of the segment)."""
    running: list[Request] = field(default_factory=list)

    def submit(self, requests: Sequence[Request]) -> None:
        self.running.extend(requests)

    def step(self) -> list[Completion]:
        random.Random(self.order + len(self.answers)).shuffle(self.running)
        count = (len(self.running) + 2) // 3 if self.is_streaming else len(self.running)
        done, self.running = self.running[:count], self.running[count:]
        completions = [self._completion(request) for request in done]
        for completion in completions:
            key = completion.request.group, completion.request.sample_index
            assert key not in self.answers, "no segment is decoded twice"
            self.answers[key] = completion
        return completions

    def _completion(self, request: Request) -> Completion:
        draws = random.Random(request.seed)
        token_ids = []
        while len(token_ids) < request.max_tokens and token_ids[-1:] != [EOS]:
            is_end = draws.random() < self.eos_rate
            token_ids.append(EOS if is_end else draws.randrange(10, 100))
        return Completion(
            request=request,
            token_ids=tuple(token_ids),
            logprobs=-np.array(token_ids, np.float32) / 100,
            finish_reason="stop" if token_ids[-1] == EOS else "length",
        )


@dataclass
class ParityVerifier:
    """Success where the ids sum to an odd number; a verdict is ready `delay` polls later."""

    delay: int = 0
    polls: int = 0
    pending: list[tuple[int, int, Verdict]] = field(default_factory=list)
    seen: list[tuple[str, bool]] = field(default_factory=list)
    """(text, is truncated) of all that was verified."""

    def submit(self, key, prompt, text, token_ids, is_truncated) -> None:
        self.seen.append((text, is_truncated))
        is_right = sum(token_ids) % 2 == 1
        verdict = Verdict(reward=float(is_right), solved=is_right)
        self.pending.append((self.polls + self.delay, key, verdict))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Verdict]]:
        self.polls += 1
        ready = [(key, verdict) for due, key, verdict in self.pending if due < self.polls]
        self.pending = [item for item in self.pending if item[0] >= self.polls]
        return ready


def make_prompts(num: int) -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", index=i, question="", token_ids=(i + 200, 2), answer="")
        for i in range(num)
    ]


def collect(
    engine: ShuffledEngine,
    prompts: Sequence[Prompt] | None = None,
    *,
    width: int = 16,
    step: int = 1,
    seed: int = 0,
    max_response_tokens: int = 36,
    verifier: ParityVerifier | None = None,
    decode=lambda ids: " ".join(map(str, ids)),
    **tree: int,
) -> list[Rollout]:
    prompts = make_prompts(6) if prompts is None else prompts
    planner = RolloutPlanner(
        len(prompts),
        total_rollouts=width * len(prompts),
        base_rollouts=1,
        allocation="uniform",
    )
    collector = TreeCollector(
        engine=engine,  # pyright: ignore[reportArgumentType]
        planner=planner,
        verifier=verifier or ParityVerifier(),  # pyright: ignore[reportArgumentType]
        decode=decode,
        tree=TreeConfig(enabled=True, **({"segment_tokens": SEGMENT_TOKENS} | tree)),
        seed=seed,
        max_response_tokens=max_response_tokens,
        clock=Clock(),
    )
    planner.begin_step([prompt.id for prompt in prompts], step)
    rollouts = collector.collect(step, prompts)
    for group in range(len(prompts)):
        rewards = [r.verdict.reward for r in rollouts if r.completion.request.group == group]
        assert planner.counts[group] == width
        assert planner.means[group] == pytest.approx(np.mean(rewards))
    return rollouts


@pytest.mark.parametrize("width", [2, 3, 8, 16])
@pytest.mark.parametrize("eos_rate", [0.0, 0.03, 0.2, 1.0])
def test_every_tree_has_exactly_its_leaves(eos_rate: float, width: int) -> None:
    rollouts = collect(ShuffledEngine(eos_rate), width=width)
    keys = [(r.completion.request.group, r.completion.request.sample_index) for r in rollouts]
    assert keys == [(group, leaf) for group in range(6) for leaf in range(width)]
    assert sorted(r.finish_order for r in rollouts) == list(range(6 * width))


@pytest.mark.parametrize("eos_rate", [0.0, 0.1])
def test_a_leaf_is_the_segments_on_its_path(eos_rate: float) -> None:
    engine = ShuffledEngine(eos_rate)
    reached = set()
    for rollout in collect(engine):
        request = rollout.completion.request
        assert request.prompt_ids == rollout.prompt.token_ids
        assert request.max_tokens == 36
        assert rollout.ancestors[0] == 0
        response: tuple[int, ...] = ()
        last = next(
            number
            for (group, number), c in engine.answers.items()
            if group == request.group and c.request.id == request.id
        )
        for number in (*rollout.ancestors[1:], last):
            segment = engine.answers[request.group, number]
            assert segment.request.prompt_ids == rollout.prompt.token_ids + response
            assert segment.request.max_tokens == min(SEGMENT_TOKENS, 36 - len(response))
            response += segment.token_ids
            reached.add((request.group, number))
        assert rollout.completion.token_ids == response
        has_ended = response[-1:] == (EOS,)
        expected = -np.array(response, np.float32) / 100
        np.testing.assert_array_equal(rollout.completion.logprobs, expected)
        assert rollout.completion.finish_reason == ("stop" if has_ended else "length")
        assert has_ended or len(response) == 36
    assert reached == engine.answers.keys(), "nothing is generated that no leaf holds"


def single_path(engine: ShuffledEngine, verifier: ParityVerifier, **options) -> Rollout:
    (rollout,) = collect(
        engine, make_prompts(1), width=1, min_fanout=1, max_fanout=1, verifier=verifier, **options
    )
    assert verifier.seen[0][1] == rollout.is_truncated
    return rollout


def test_a_path_ends_with_an_end_token_the_length_or_the_depth() -> None:
    rollout = single_path(ShuffledEngine(1.0), ParityVerifier())
    assert rollout.completion.token_ids == (EOS,)
    assert not rollout.is_truncated
    rollout = single_path(ShuffledEngine(0.0), ParityVerifier(), max_response_tokens=10)
    assert (rollout.num_tokens, len(rollout.ancestors), rollout.is_truncated) == (10, 3, True)
    rollout = single_path(ShuffledEngine(0.0), ParityVerifier(), max_depth=2)
    assert (rollout.num_tokens, len(rollout.ancestors), rollout.is_truncated) == (8, 2, True)


def test_a_path_ends_when_its_text_repeats_itself() -> None:
    # Eight times 32 equal characters: the 64th segment of four.
    options = {"max_response_tokens": 400, "max_depth": 100}
    verifier = ParityVerifier()
    rollout = single_path(
        ShuffledEngine(0.0), verifier, decode=lambda ids: "a" * len(ids), **options
    )
    assert (rollout.num_tokens, rollout.is_truncated) == (256, True)
    assert verifier.seen == [("a" * 256, True)]
    varied = single_path(ShuffledEngine(0.0), ParityVerifier(), **options)
    assert varied.num_tokens == 400


@given(st.text("ab", max_size=40), st.text("ab", max_size=40), st.integers(1, 16))
def test_repetition_is_eight_times_the_same_text_without_overlap(start, piece, times) -> None:
    text = start + piece * times
    windows = {text[i : i + REPEATED_CHARS] for i in range(len(text) - REPEATED_CHARS + 1)}
    most = max(map(text.count, windows), default=0)
    assert is_repetitive(text) == (most >= MAX_REPEATS)


@pytest.mark.parametrize("text", ["-" * 80, "|" + "---|" * 16, "1/3 = 0." + "3" * 40, " " * 200])
def test_rules_and_indentation_are_no_repetition(text) -> None:
    assert not is_repetitive(text)


def grown(
    width: int, ends: Sequence[int], *, fanout: int, seed: int = 0
) -> tuple[Tree, list[list[int]]]:
    """A tree of which `ends[k]` segments of round k end a path, the last ones; and its rounds."""
    config = TreeConfig(min_fanout=fanout, max_fanout=fanout)
    tree = Tree(width, config, functools.partial(request_seed, seed))
    rounds = [tree.grow()]
    for count in ends:
        for i in rounds[-1][len(rounds[-1]) - count :]:
            tree.segments[i].is_last = True
        rounds.append(tree.grow())
    return tree, rounds


def children(tree: Tree, numbers: Sequence[int]) -> Counter[int]:
    return Counter(tree.segments[i].parent for i in numbers)


@pytest.mark.parametrize(
    ("ends", "sizes"),
    [
        ([0, 0, 0, 0], [3, 6, 12, 16, 16]),
        # 2 live and 1 finished: 2 * 2 + 2 * 1 = 6. Then 2 live and 4 finished: 12, of which 11 fit.
        ([1, 4], [3, 6, 11]),
        # None lives: 2 * 3 = 6 from finished paths, then all 6 live on.
        ([3, 0], [3, 6, 12]),
        ([3, 6, 7, 0], [3, 6, 7, 0, 0]),
        # 12 live on and 4 leaves are missing nothing.
        ([0, 0, 0, 4], [3, 6, 12, 16, 12]),
    ],
)
def test_the_fork_rule_by_hand(ends: list[int], sizes: list[int]) -> None:
    _, rounds = grown(16, ends, fanout=3)
    assert [len(numbers) for numbers in rounds] == sizes


@given(st.integers(1, 20), st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_fork_rule_at_random(width: int, fanout: int, choices: random.Random) -> None:
    tree, (numbers,) = grown(width, [], fanout=fanout)
    assert children(tree, numbers) == {0: min(fanout, width)}
    while numbers:
        # Every path ends sooner or later.
        ended = [i for i in numbers if choices.random() < 0.4 or tree.segments[i].depth == 9]
        for i in ended:
            tree.segments[i].is_last = True
        live = set(numbers) - set(ended)
        numbers = tree.grow()
        room = max(width - len(tree.leaves), 0)
        assert len(numbers) == max(len(live), min(room, 2 * len(live) + 2 * len(ended)))
        forks = children(tree, numbers)
        if live:
            assert forks.keys() == live, "every live path goes on"
            assert max(forks.values()) - min(forks.values()) <= 1, "spread evenly"
        finished = {i for leaf in tree.leaves for i in tree.path(leaf)[:-1]}
        assert live or forks.keys() <= finished
        assert not forks.keys() & set(tree.leaves)
    assert len(tree.leaves) == width


def test_with_none_live_finished_paths_fork_at_any_earlier_boundary() -> None:
    depths: Counter[int] = Counter()
    for seed in range(50):
        # One path, then two, which end: four forks from the prompt or from the first segment.
        tree, rounds = grown(8, [0, 2], fanout=1, seed=seed)
        depths.update(tree.segments[tree.segments[i].parent].depth for i in rounds[2])
    assert depths.keys() == {0, 1}
    assert depths.total() == 200
    assert 60 < depths[0] < 140


def test_the_first_fan_out_is_drawn_for_each_prompt_and_step() -> None:
    def fanouts(step: int, seed: int = 0) -> list[int]:
        engine = ShuffledEngine(0.0)
        collect(engine, make_prompts(60), step=step, seed=seed)
        roots = Counter(g for (g, _), c in engine.answers.items() if len(c.request.prompt_ids) == 2)
        return [roots[group] for group in range(60)]

    first = fanouts(1)
    assert set(first) == set(range(2, 9))
    assert first == fanouts(1)
    assert first != fanouts(2)
    assert first != fanouts(1, seed=1)


def essence(rollouts: Sequence[Rollout]) -> list[tuple]:
    """What must not depend on the order of the engine's answers."""
    return [
        (
            r.prompt.id,
            r.completion.request.sample_index,
            r.completion.token_ids,
            r.completion.logprobs.tolist(),
            r.completion.finish_reason,
            r.ancestors,
            r.num_shared_tokens,
            r.verdict,
        )
        for r in rollouts
    ]


def test_trees_do_not_depend_on_the_order_of_answers() -> None:
    first = essence(collect(ShuffledEngine()))
    for order in (1, 2):
        assert essence(collect(ShuffledEngine(order=order))) == first
    assert essence(collect(ShuffledEngine(is_streaming=False))) == first
    assert essence(collect(ShuffledEngine(), verifier=ParityVerifier(delay=9))) == first


def test_trees_do_not_depend_on_other_prompts() -> None:
    prompts = make_prompts(6)
    whole = essence(collect(ShuffledEngine(), prompts))
    some = essence(collect(ShuffledEngine(), [prompts[4], prompts[1]]))
    assert some == whole[4 * 16 : 5 * 16] + whole[16:32]


def test_seed_and_step_change_the_trees() -> None:
    first = essence(collect(ShuffledEngine()))
    assert essence(collect(ShuffledEngine(), seed=1)) != first
    assert essence(collect(ShuffledEngine(), step=2)) != first


def test_shared_tokens_are_generated_and_counted_once() -> None:
    engine = ShuffledEngine(0.02)
    rollouts = collect(engine)
    generated = sum(len(c.token_ids) for c in engine.answers.values())
    total = sum(r.num_tokens for r in rollouts)
    metrics = rollout_metrics(rollouts, np.array([r.verdict.reward for r in rollouts]))
    assert metrics["tokens/generated"] == generated < 0.9 * total
    assert metrics["tokens/shared_frac"] == pytest.approx(1 - generated / total)

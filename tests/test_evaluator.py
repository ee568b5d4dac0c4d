"""The evaluator on a scripted engine, and its numbers against a count by hand."""

import numpy as np
import pytest

from xrpo_fast.evaluator import (
    Evaluator,
    MathEquivalence,
    Sample,
    counts_of,
    summarise,
    votes_of,
)
from xrpo_fast.rewards import make_verifier
from xrpo_fast.types import Completion, Prompt, Verdict


class ScriptedEngine:
    """Answers the prompt's first token, or the next number where the request's seed is odd;
    finishes two requests per step, the last submitted first."""

    is_streaming = True
    num_slots = 4

    def __init__(self) -> None:
        self.waiting = []
        self.seen = []

    def submit(self, requests):
        self.waiting += requests
        self.seen += requests

    def step(self):
        done = [self.waiting.pop() for _ in range(min(2, len(self.waiting)))]
        return [
            Completion(
                request=request,
                token_ids=(request.prompt_ids[0] + request.seed % 2,),
                logprobs=np.zeros(1, np.float32),
                finish_reason="length" if request.sample_index == 0 else "stop",
            )
            for request in done
        ]


@pytest.fixture
def prompts():
    return [
        Prompt(
            id=f"q{i}",
            index=i,
            question=f"say {i}",
            token_ids=(i, 99),
            answer=str(i),
            tier="low" if i < 2 else "high",
        )
        for i in range(4)
    ]


@pytest.fixture
def evaluator():
    with make_verifier(["exact"], workers=0) as verifier:
        yield Evaluator(
            engine=ScriptedEngine(),
            verifier=verifier,
            decode=lambda token_ids: str(token_ids[0]),
            seed=0,
            max_response_tokens=8,
        )


def test_samples_are_complete_in_order_and_graded(evaluator, prompts):
    samples = evaluator.sample(prompts, 3)
    assert [(s.prompt_index, s.sample_index) for s in samples] == [
        (q, i) for q in range(4) for i in range(3)
    ]
    for sample in samples:
        assert sample.text == str(sample.token_ids[0])
        assert sample.verdict.solved == (sample.text == str(sample.prompt_index))
        assert sample.is_truncated == (sample.sample_index == 0)
    assert len({request.id for request in evaluator.engine.seen}) == 12
    assert all(request.max_tokens == 8 for request in evaluator.engine.seen)


def test_a_sample_does_not_depend_on_what_else_is_asked_for(evaluator, prompts):
    everything = {(s.prompt_index, s.sample_index): s for s in evaluator.sample(prompts, 4)}
    some = list(evaluator.stream(prompts, [(3, 2), (0, 1)]))
    assert {(s.prompt_index, s.sample_index) for s in some} == {(3, 2), (0, 1)}
    for sample in some:
        assert sample == everything[sample.prompt_index, sample.sample_index]
    assert len({s.token_ids[0] - s.prompt_index for s in everything.values()}) == 2


def test_nothing_wanted_nothing_done(evaluator, prompts):
    assert list(evaluator.stream(prompts, [])) == []


def sample_of(question, index, answer, *, solved, num_tokens=2, truncated=False, error=None):
    return Sample(
        prompt_index=question,
        sample_index=index,
        token_ids=(1,) * num_tokens,
        is_truncated=truncated,
        verdict=Verdict(reward=float(solved), solved=solved, error=error, extracted=answer),
        text=str(answer),
    )


@pytest.fixture
def graded():
    """Four samples of two questions: 1 of 4 right, and 2 of 4 right with the most votes."""
    first = [sample_of(0, i, a, solved=a == "7") for i, a in enumerate(["7", "8", "8", None])]
    second = [
        sample_of(1, 0, "1/2", solved=True, num_tokens=6),
        sample_of(1, 1, "0.5", solved=True, num_tokens=6, truncated=True),
        sample_of(1, 2, "3", solved=False),
        sample_of(1, 3, "4", solved=False, error="timed out"),
    ]
    return first + second


def test_summary_by_hand(prompts, graded):
    values = summarise("set", prompts[:2], graded, [1, 4, 8])
    expected = {
        "eval/set/pass@1": 3 / 8,
        "eval/set/pass@4": 1.0,
        "eval/set/cons@4": (0 + 1 / 2) / 2,
        "eval/set/mean_length": 3.0,
        "eval/set/truncated_frac": 1 / 8,
        "eval/set/errors": 1,
        "eval/set/samples": 4,
        "eval/set/tier/low/pass@1": 3 / 8,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert "eval/set/pass@8" not in values, "more than there are samples"
    assert "eval/set/cons@1" not in values, "that is pass@1"
    for name in ("pass@1", "pass@4", "cons@4"):
        low, high = values[f"eval/set/{name}/low"], values[f"eval/set/{name}/high"]
        assert low <= values[f"eval/set/{name}"] <= high


def test_equivalent_answers_are_counted_as_one(prompts, graded):
    def equal(a, b):
        return {a, b} == {"1/2", "0.5"}

    values = summarise("set", prompts[:2], graded, [4], equivalent=equal)
    assert values["eval/set/cons@4"] == pytest.approx(1 / 2)
    classes, is_right = votes_of(prompts[:2], graded, equal)[1]
    assert classes.tolist() == [0, 0, 1, 2]
    assert is_right.tolist() == [True, False, False]


def test_no_votes_where_the_reward_extracts_nothing(prompts):
    samples = [sample_of(0, i, None, solved=i == 0) for i in range(4)]
    values = summarise("set", prompts[:1], samples, [1, 4])
    assert not any("cons" in name for name in values)
    assert values["eval/set/pass@1"] == 0.25


def test_counts_of_questions_with_different_numbers_of_samples(prompts):
    samples = [
        sample_of(0, 0, "a", solved=True),
        *(sample_of(1, i, "b", solved=i > 0) for i in range(3)),
    ]
    num_samples, num_correct = counts_of(prompts[:2], samples)
    assert num_samples.tolist() == [1, 3]
    assert num_correct.tolist() == [1, 2]


def test_summary_of_the_same_samples_is_the_same(prompts, graded):
    first = summarise("set", prompts[:2], graded, [1, 2, 4], seed=3)
    again = summarise("set", prompts[:2], graded, [1, 2, 4], seed=3)
    assert first == again


def test_math_equivalence_asks_the_math_reward():
    equivalence = MathEquivalence(timeout_s=20.0, options={"answer_format": "hash"})
    try:
        assert equivalence(r"\frac{1}{2}", "0.5")
        assert equivalence("0.5", r"\frac{1}{2}"), "in both directions"
        assert not equivalence("0.5", "0.6")
        assert not equivalence("x + ", "]]"), "what cannot be parsed is equal to nothing"
    finally:
        equivalence.close()

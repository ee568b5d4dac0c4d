"""Samples of held-out prompts -> pass@k and cons@k with intervals. Used in training and alone."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrpo_fast.estimators import (
    Interval,
    Votes,
    answer_classes,
    class_verdicts,
    cons_at_k,
    cons_interval,
    pass_interval,
)
from xrpo_fast.rewards import Verifier, make_verifier
from xrpo_fast.schedule import request_seed
from xrpo_fast.types import Engine, Prompt, Request, Verdict

POLL_TIMEOUT_S = 0.05
FIRST_EVAL_ID = 2**48
"""Request ids of evaluation, far from those of training: an engine wants them unique."""

Equivalence = Callable[[str, str], bool]


@dataclass(kw_only=True, slots=True, frozen=True)
class Sample:
    """One graded response to one held-out prompt."""

    prompt_index: int
    """Position in the evaluated set."""
    sample_index: int
    token_ids: tuple[int, ...]
    """[L] sampled ids, the EOS included when one was sampled."""
    is_truncated: bool
    verdict: Verdict
    text: str
    """As the verifier saw it."""


class Evaluator:
    """Rolls out held-out prompts with an engine and grades them.

    Args:
        equivalent: merges final answers for cons@k; None: equal strings.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        verifier: Verifier,
        decode: Callable[[Sequence[int]], str],
        seed: int,
        max_response_tokens: int,
        equivalent: Equivalence | None = None,
    ) -> None:
        self.engine = engine
        self.verifier = verifier
        self.decode = decode
        self.seed = seed
        self.max_response_tokens = max_response_tokens
        self.equivalent = equivalent
        self._ids = itertools.count(FIRST_EVAL_ID)

    def sample(self, prompts: Sequence[Prompt], num_samples: int) -> list[Sample]:
        """num_samples responses per prompt, ordered by prompt and sample index."""
        wanted = list(itertools.product(range(len(prompts)), range(num_samples)))
        return sorted(self.stream(prompts, wanted), key=lambda s: (s.prompt_index, s.sample_index))

    def stream(
        self, prompts: Sequence[Prompt], wanted: Sequence[tuple[int, int]]
    ) -> Iterator[Sample]:
        """The wanted (prompt index, sample index) pairs, as they are graded.

        The seed of a sample depends on (seed, prompt, sample index) alone, so that evaluations at
        different steps are paired, and one that was broken off goes on with the same samples.
        """
        requests = [self._request(prompts[group], group, index) for group, index in wanted]
        self.engine.submit(requests)
        running = len(requests)
        ungraded: dict[int, tuple[Request, tuple[int, ...], bool, str]] = {}
        while running or ungraded:
            for completion in self.engine.step() if running else []:
                running -= 1
                request, token_ids = completion.request, completion.token_ids
                text = self.decode(token_ids)
                is_truncated = completion.finish_reason == "length"
                ungraded[request.id] = request, token_ids, is_truncated, text
                self.verifier.submit(
                    request.id, prompts[request.group], text, token_ids, is_truncated
                )
            for key, verdict in self.verifier.poll(0.0 if running else POLL_TIMEOUT_S):
                request, token_ids, is_truncated, text = ungraded.pop(key)
                yield Sample(
                    prompt_index=request.group,
                    sample_index=request.sample_index,
                    token_ids=token_ids,
                    is_truncated=is_truncated,
                    verdict=verdict,
                    text=text,
                )

    def _request(self, prompt: Prompt, group: int, sample_index: int) -> Request:
        return Request(
            id=next(self._ids),
            group=group,
            sample_index=sample_index,
            prompt_ids=prompt.token_ids,
            seed=request_seed(self.seed, "eval", prompt.id, sample_index),
            max_tokens=self.max_response_tokens,
        )

    def summarise(
        self, name: str, prompts: Sequence[Prompt], samples: Sequence[Sample], ks: Sequence[int]
    ) -> dict[str, float]:
        """eval/<name>/* of the samples: pass@k, cons@k, intervals, lengths, tiers."""
        return summarise(name, prompts, samples, ks, seed=self.seed, equivalent=self.equivalent)


class MathEquivalence:
    """Whether two final answers are equal as mathematics, asked of the math reward in a worker
    process: comparing what a model wrote may take for ever, and only a process can be stopped.
    Not equal where the comparison fails.

    Args:
        options: of the math reward; answer_format, which says where one stands, is left out.
    """

    def __init__(self, timeout_s: float, options: Mapping[str, Any]) -> None:
        policy = {k: v for k, v in options.items() if k != "answer_format"}
        self._verifier = make_verifier(
            ["math"], workers=1, timeout_s=timeout_s, max_error_frac=1.0, options={"math": policy}
        )
        self._known: dict[tuple[str, str], bool] = {}

    def __call__(self, first: str, second: str) -> bool:
        pair = min(first, second), max(first, second)
        if pair not in self._known:
            asked = Prompt(
                id="", index=0, question="", token_ids=(), answer=f"\\boxed{{{pair[0]}}}"
            )
            self._verifier.submit(0, asked, f"\\boxed{{{pair[1]}}}", (), False)
            verdicts: list[tuple[int, Verdict]] = []
            while not verdicts:
                verdicts = self._verifier.poll(POLL_TIMEOUT_S)
            self._known[pair] = verdicts[0][1].solved
        return self._known[pair]

    def close(self) -> None:
        self._verifier.close()


def counts_of(
    prompts: Sequence[Prompt], samples: Sequence[Sample]
) -> tuple[np.ndarray, np.ndarray]:
    """(samples, solved samples) of each prompt, both (Q,) int."""
    index = np.array([sample.prompt_index for sample in samples])
    solved = np.array([sample.verdict.solved for sample in samples], dtype=np.int64)
    num_samples = np.bincount(index, minlength=len(prompts))
    return num_samples, np.bincount(index, solved, len(prompts)).astype(np.int64)


def votes_of(
    prompts: Sequence[Prompt], samples: Sequence[Sample], equivalent: Equivalence | None
) -> Votes:
    """Classes of equivalent answers of each prompt, and which of them are right."""
    by_prompt: list[list[Sample]] = [[] for _ in prompts]
    for sample in samples:
        by_prompt[sample.prompt_index].append(sample)
    votes = []
    for group in by_prompt:
        classes = answer_classes([s.verdict.extracted for s in group], equivalent)
        votes.append((classes, class_verdicts(classes, [s.verdict.solved for s in group])))
    return votes


def cons_of(votes: Votes, k: int, seed: int) -> np.ndarray:
    """cons@k of each question (Q,)."""
    return np.array(
        [
            cons_at_k(
                [None if c < 0 else str(c) for c in classes],
                [c >= 0 and bool(is_right[c]) for c in classes],
                k,
                seed=seed,
            )
            for classes, is_right in votes
        ]
    )


def summarise(
    name: str,
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    ks: Sequence[int],
    *,
    seed: int = 0,
    equivalent: Equivalence | None = None,
) -> dict[str, float]:
    """Metrics by logged name; every accuracy with .../low and .../high of its interval.

    cons@k is given where k > 1 and the reward extracts answers.
    """
    num_samples, num_correct = counts_of(prompts, samples)
    lengths = np.array([len(sample.token_ids) for sample in samples])
    has_answers = any(sample.verdict.extracted is not None for sample in samples)
    votes = votes_of(prompts, samples, equivalent) if has_answers else []
    values: dict[str, float] = {}
    # pass@1 is the accuracy that displays and reports show, whatever else was asked for.
    for k in [k for k in sorted({1, *ks}) if k <= num_samples.min()]:
        passed = pass_interval(num_samples, num_correct, k, seed)
        values.update(with_bounds(f"eval/{name}/pass@{k}", passed))
        if k > 1 and has_answers:
            point = float(cons_of(votes, k, seed).mean())
            voted = cons_interval(votes, k, point, seed)
            values.update(with_bounds(f"eval/{name}/cons@{k}", voted))
    values[f"eval/{name}/mean_length"] = float(lengths.mean())
    values[f"eval/{name}/truncated_frac"] = float(np.mean([s.is_truncated for s in samples]))
    values[f"eval/{name}/errors"] = sum(s.verdict.error is not None for s in samples)
    values[f"eval/{name}/samples"] = int(num_samples.min())
    for tier in sorted({prompt.tier for prompt in prompts if prompt.tier}):
        inside = np.array([prompt.tier == tier for prompt in prompts])
        share = num_correct[inside].sum() / num_samples[inside].sum()
        values[f"eval/{name}/tier/{tier}/pass@1"] = float(share)
    return values


def with_bounds(name: str, interval: Interval) -> Mapping[str, float]:
    """The three numbers of an interval by logged name."""
    return {name: interval.mean, f"{name}/low": interval.low, f"{name}/high": interval.high}

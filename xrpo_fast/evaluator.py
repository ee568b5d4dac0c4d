"""Samples of held-out prompts -> pass@k and cons@k with intervals. Used in training and alone."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xrpo_fast.estimators import (
    answer_classes,
    class_verdicts,
    cons_at_k,
    cons_interval,
    pass_interval,
)
from xrpo_fast.rewards import Verifier
from xrpo_fast.schedule import request_seed
from xrpo_fast.types import Completion, Engine, Prompt, Request, Verdict

POLL_TIMEOUT_S = 0.05
FIRST_EVAL_ID = 2**48
"""Request ids of evaluation, far from those of training: an engine wants them unique."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sample:
    """One graded response to one held-out prompt."""

    prompt_index: int
    sample_index: int
    completion: Completion
    verdict: Verdict
    text: str


class Evaluator:
    """Rolls out held-out prompts with an engine and grades them.

    Args:
        equivalent: merges canonical answers for cons@k; None: equal strings.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        verifier: Verifier,
        decode: Callable[[Sequence[int]], str],
        seed: int,
        max_response_tokens: int,
        equivalent: Callable[[str, str], bool] | None = None,
    ) -> None:
        self.engine = engine
        self.verifier = verifier
        self.decode = decode
        self.seed = seed
        self.max_response_tokens = max_response_tokens
        self.equivalent = equivalent
        self._ids = itertools.count(FIRST_EVAL_ID)

    def sample(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        *,
        on_sample: Callable[[int], None] | None = None,
    ) -> list[Sample]:
        """num_samples responses per prompt, ordered by prompt and sample index.

        The seed of a sample depends on (seed, prompt, sample index) alone, so that evaluations at
        different steps are paired.
        """
        requests = [
            Request(
                id=next(self._ids),
                group=group,
                sample_index=sample_index,
                prompt_ids=prompt.token_ids,
                seed=request_seed(self.seed, "eval", prompt.id, sample_index),
                max_tokens=self.max_response_tokens,
            )
            for group, prompt in enumerate(prompts)
            for sample_index in range(num_samples)
        ]
        self.engine.submit(requests)
        completions: dict[int, Completion] = {}
        verdicts: dict[int, Verdict] = {}
        texts: dict[int, str] = {}
        while len(verdicts) < len(requests):
            if len(completions) < len(requests):
                finished = self.engine.step()
                for completion in finished:
                    request = completion.request
                    completions[request.id] = completion
                    text = self.decode(completion.token_ids)
                    texts[request.id] = text
                    self.verifier.submit(
                        request.id,
                        prompts[request.group],
                        text,
                        completion.token_ids,
                        completion.finish_reason == "length",
                    )
                if on_sample is not None and finished:
                    on_sample(len(finished))
                verdicts.update(self.verifier.poll())
            else:
                verdicts.update(self.verifier.poll(POLL_TIMEOUT_S))
        return [
            Sample(
                prompt_index=request.group,
                sample_index=request.sample_index,
                completion=completions[request.id],
                verdict=verdicts[request.id],
                text=texts[request.id],
            )
            for request in requests
        ]

    def summarise(
        self, name: str, prompts: Sequence[Prompt], samples: Sequence[Sample], ks: Sequence[int]
    ) -> dict[str, float]:
        """eval/<name>/* of the samples: pass@k, cons@k, avg, intervals, lengths, tiers."""
        return summarise(name, prompts, samples, ks, seed=self.seed, equivalent=self.equivalent)


def summarise(
    name: str,
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    ks: Sequence[int],
    *,
    seed: int = 0,
    equivalent: Callable[[str, str], bool] | None = None,
) -> dict[str, float]:
    """Metrics by logged name; every accuracy with .../low and .../high of its interval."""
    by_prompt: list[list[Sample]] = [[] for _ in prompts]
    for sample in samples:
        by_prompt[sample.prompt_index].append(sample)
    num_samples = np.array([len(group) for group in by_prompt])
    num_correct = np.array([sum(s.verdict.solved for s in group) for group in by_prompt])
    lengths = np.array([len(sample.completion.token_ids) for sample in samples])
    cut = [sample.completion.finish_reason == "length" for sample in samples]
    values: dict[str, float] = {}
    classes = [answer_classes([s.verdict.extracted for s in g], equivalent) for g in by_prompt]
    verdicts = [
        class_verdicts(numbers, [s.verdict.solved for s in group])
        for numbers, group in zip(classes, by_prompt, strict=True)
    ]
    has_answers = any(sample.verdict.extracted is not None for sample in samples)
    for k in [k for k in ks if k <= num_samples.min()]:
        interval = pass_interval(num_samples, num_correct, k, seed)
        values.update(_named(f"eval/{name}/pass@{k}", interval))
        if k > 1 and has_answers:
            point = np.mean(
                [
                    cons_at_k(
                        [None if c < 0 else str(c) for c in numbers],
                        [s.verdict.solved for s in group],
                        k,
                        seed=seed,
                    )
                    for numbers, group in zip(classes, by_prompt, strict=True)
                ]
            )
            voted = cons_interval(classes, verdicts, k, float(point), seed)
            values.update(_named(f"eval/{name}/cons@{k}", voted))
    values[f"eval/{name}/mean_length"] = float(lengths.mean())
    values[f"eval/{name}/truncated_frac"] = float(np.mean(cut))
    values[f"eval/{name}/errors"] = sum(s.verdict.error is not None for s in samples)
    values[f"eval/{name}/samples"] = int(num_samples.min())
    for tier in sorted({prompt.tier for prompt in prompts if prompt.tier}):
        inside = np.array([prompt.tier == tier for prompt in prompts])
        share = num_correct[inside].sum() / num_samples[inside].sum()
        values[f"eval/{name}/tier/{tier}/pass@1"] = float(share)
    return values


def _named(name: str, interval) -> Mapping[str, float]:
    return {name: interval.mean, f"{name}/low": interval.low, f"{name}/high": interval.high}

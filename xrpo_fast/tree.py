"""Rollouts that grow as one tree per prompt and share their first segments (TreePO).

A path is decoded one segment at a time, each an engine request whose prompt is the prompt and all
of the path so far: vLLM reads it from its prefix cache, the transformers engine computes it again.
A tree goes on when all segments of its own round are in; it never waits for another tree.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from xrpo_fast.branching import Tree, is_repetitive
from xrpo_fast.config import TreeConfig
from xrpo_fast.metrics import Clock
from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.rewards import Verifier
from xrpo_fast.schedule import POLL_TIMEOUT_S, request_seed, timed_step
from xrpo_fast.types import Completion, Engine, Prompt, Request, Rollout, Verdict


@dataclass(kw_only=True, slots=True)
class _Step:
    """What is known of the step under way."""

    index: int
    prompts: Sequence[Prompt]
    trees: list[Tree]
    num_running: int = 0
    finish_order: list[int] = field(default_factory=list)
    """Ids of the requests that ended a path; they name its text and verdict too."""
    texts: dict[int, str] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)


@dataclass(kw_only=True)
class TreeCollector:
    """Rolls out one step's prompts as trees and returns every leaf with its verdict.

    All randomness is hashed from (seed, step, prompt, segment): trees do not depend on the order in
    which an engine answers, nor on other prompts.

    Args:
        planner: gives each tree its width.
        decode: token ids -> text, called where verifier or the check for repetition needs text.
    """

    engine: Engine
    planner: RolloutPlanner
    verifier: Verifier
    decode: Callable[[Sequence[int]], str]
    tree: TreeConfig
    seed: int
    max_response_tokens: int
    clock: Clock
    _ids: Iterator[int] = field(default_factory=itertools.count, init=False)

    def collect(self, step: int, prompts: Sequence[Prompt]) -> list[Rollout]:
        """All leaves of the step, ordered by prompt and, within it, by the round they ended in."""
        with self.clock("plan"):
            widths = self.planner.plan_round().tolist()
            trees = [
                Tree(width, self.tree, functools.partial(self._draw, step, prompt.id))
                for width, prompt in zip(widths, prompts, strict=True)
            ]
        run = _Step(index=step, prompts=prompts, trees=trees)
        self._grow(run, range(len(trees)))
        while run.num_running:
            completions = timed_step(self.engine, run.num_running, self.clock)
            run.num_running -= len(completions)
            with self.clock("verify"):
                for completion in completions:
                    self._take(run, completion)
                run.verdicts.update(self.verifier.poll())
            groups = {completion.request.group for completion in completions}
            self._grow(run, sorted(g for g in groups if trees[g].is_round_done))
        with self.clock("verify"):
            while len(run.verdicts) < len(run.finish_order):
                run.verdicts.update(self.verifier.poll(POLL_TIMEOUT_S))
        rollouts = self._rollouts(run)
        with self.clock("plan"):
            rewards = [rollout.verdict.reward for rollout in rollouts]
            self.planner.observe([r.completion.request.group for r in rollouts], rewards)
        return rollouts

    def _draw(self, step: int, prompt_id: str, purpose: str, segment: int) -> int:
        return request_seed(self.seed, step, prompt_id, purpose, segment)

    def _grow(self, run: _Step, groups: Sequence[int]) -> None:
        """Submit the next round of these trees."""
        with self.clock("plan"):
            requests = [
                self._request(run, group, index)
                for group in groups
                for index in run.trees[group].grow()
            ]
        if requests:
            run.num_running += len(requests)
            with self.clock("generate"):
                self.engine.submit(requests)

    def _request(self, run: _Step, group: int, index: int) -> Request:
        """One segment; its number in the tree stands for the sample index."""
        tree, prompt = run.trees[group], run.prompts[group]
        prefix = tree.token_ids(tree.path(tree.segments[index].parent))
        return Request(
            id=next(self._ids),
            group=group,
            sample_index=index,
            prompt_ids=prompt.token_ids + prefix,
            seed=self._draw(run.index, prompt.id, "segment", index),
            max_tokens=min(self.tree.segment_tokens, self.max_response_tokens - len(prefix)),
        )

    def _take(self, run: _Step, completion: Completion) -> None:
        """Put a segment into its tree; a path that ends with it goes to the verifier."""
        request = completion.request
        tree, prompt = run.trees[request.group], run.prompts[request.group]
        segment = tree.segments[request.sample_index]
        segment.completion = completion
        token_ids = tree.token_ids(tree.path(request.sample_index))
        is_full = (
            completion.finish_reason == "stop"
            or len(token_ids) == self.max_response_tokens
            or segment.depth == self.tree.max_depth
        )
        text = self.decode(token_ids)
        if is_full or is_repetitive(text):
            segment.is_last = True
            run.finish_order.append(request.id)
            run.texts[request.id] = text
            is_truncated = completion.finish_reason == "length"
            self.verifier.submit(request.id, prompt, text, token_ids, is_truncated)

    def _rollouts(self, run: _Step) -> list[Rollout]:
        order = {request_id: i for i, request_id in enumerate(run.finish_order)}
        rollouts = []
        for prompt, tree in zip(run.prompts, run.trees, strict=True):
            seen: set[int] = set()
            for sample_index, leaf in enumerate(tree.leaves):
                path = tree.path(leaf)
                parts = [part for i in path if (part := tree.segments[i].completion)]
                request = dataclasses.replace(
                    parts[-1].request,
                    sample_index=sample_index,
                    prompt_ids=prompt.token_ids,
                    max_tokens=self.max_response_tokens,
                )
                completion = Completion(
                    request=request,
                    token_ids=tree.token_ids(path),
                    logprobs=np.concatenate([part.logprobs for part in parts]),
                    finish_reason=parts[-1].finish_reason,
                )
                rollouts.append(
                    Rollout(
                        prompt=prompt,
                        completion=completion,
                        text=run.texts[request.id],
                        verdict=run.verdicts[request.id],
                        finish_order=order[request.id],
                        ancestors=tuple(path[:-1]),
                        num_shared_tokens=sum(
                            tree.segments[i].num_tokens for i in path if i in seen
                        ),
                    )
                )
                seen.update(path)
        return rollouts

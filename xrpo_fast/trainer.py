"""One step of training, the stages in order.

    prompts -> planner -> rollouts -> rewards -> advantages -> batches -> loss -> update

Three arrows run back: rewards to the planner (inside collect), successes to the exemplars, weights
to the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from xrpo_fast.advantages import fill_advantages, make_rows, shape_advantages, step_rewards
from xrpo_fast.batching import cut_groups, cut_mini_batches
from xrpo_fast.config import Config
from xrpo_fast.data import PromptSet
from xrpo_fast.doctor import check_agreement, check_finite
from xrpo_fast.exemplars import ExemplarStore, PromptStates, Success
from xrpo_fast.metrics import Clock, memory_metrics
from xrpo_fast.ops import XrpoAdvantages
from xrpo_fast.planner import RolloutPlanner
from xrpo_fast.policy import Policy
from xrpo_fast.prompt_sampler import PromptSampler
from xrpo_fast.schedule import Collector
from xrpo_fast.seeding import PromptSeeder
from xrpo_fast.step_metrics import has_signal, novelty_metrics, rollout_metrics
from xrpo_fast.tree import TreeCollector
from xrpo_fast.types import Engine, Prompt, Rollout, TrainingRow
from xrpo_fast.update import Updater


@dataclass(kw_only=True, slots=True)
class StepResult:
    """What a step leaves behind: its numbers and what was rolled out."""

    metrics: dict[str, Any]
    rollouts: list[Rollout]
    shaped: XrpoAdvantages


@dataclass(kw_only=True)
class Trainer:
    """The stages of a run and its position; assemble.py builds it from a config."""

    config: Config
    prompts: PromptSet
    sampler: PromptSampler
    policy: Policy
    engine: Engine
    engine_dtype: torch.dtype
    planner: RolloutPlanner
    collector: Collector | TreeCollector
    seeder: PromptSeeder | None
    exemplars: ExemplarStore | None
    states: PromptStates | None
    updater: Updater
    clock: Clock
    steps_done: int = 0

    def step(self) -> StepResult:
        """Plan, generate, verify, shape, update, hand over; one host read of the metrics."""
        step = self.steps_done + 1
        prompts = self._draw_prompts()
        with self.clock("plan"):
            self.planner.begin_step([prompt.id for prompt in prompts], step)
        rollouts = self.collector.collect(step, prompts)
        with self.clock("sync"):
            self.engine.sleep()
        self._give_back(prompts, rollouts)
        cuts = cut_groups(self._trained_groups(rollouts), self.config.optim.updates_per_step)
        rewards = step_rewards(rollouts, self.config.loss, self.config.rollout.max_response_tokens)
        rows, shaped = self._shape(rollouts, rewards, cuts)
        self._update(rows, cuts)
        with self.clock("sync"):
            self.policy.release_memory()
            self.engine.wake()
            self.engine.load_weights(self.policy.engine_weights())
        with self.clock("retrieve"):
            self._remember(rollouts, prompts, step)
        self.steps_done = step
        return StepResult(
            metrics=self._measure(rollouts, rewards, rows, shaped),
            rollouts=rollouts,
            shaped=shaped,
        )

    def _draw_prompts(self) -> list[Prompt]:
        """The next prompts in the data's order; those that rest (prompt states) are passed over,
        but when the whole data set has been looked at, they are better than none."""
        wanted = min(self.config.rollout.prompts_per_step, len(self.prompts))
        drawn: list[int] = []
        resting: list[int] = []
        again: list[int] = []
        while len(drawn) < wanted and len(drawn) + len(resting) < len(self.prompts):
            for index in self.sampler.next_batch(wanted - len(drawn)):
                epoch = self.sampler.epoch_of(index)
                rests = self.states is not None and self.states.should_skip(index, epoch)
                is_repeated = index in drawn or index in resting
                (again if is_repeated else resting if rests else drawn).append(index)
        self.sampler.give_back(again)
        drawn += resting[: wanted - len(drawn)]
        return [self.prompts[index] for index in drawn]

    def _give_back(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> None:
        """Prompts that dynamic sampling did not need come first in the next step."""
        used = {rollout.prompt.index for rollout in rollouts}
        self.sampler.give_back([p.index for p in prompts if p.index not in used])

    def _trained_groups(self, rollouts: Sequence[Rollout]) -> list[int]:
        """Positions of the prompts that the loss averages over: all, but with dynamic sampling
        those with signal."""
        rewards: dict[int, list[float]] = {}
        for rollout in rollouts:
            group = rollout.completion.request.group
            rewards.setdefault(group, []).append(rollout.verdict.reward)
        filters = self.config.planner.allocation == "dapo"
        return [group for group, own in rewards.items() if not filters or has_signal(own)]

    def _shape(
        self, rollouts: Sequence[Rollout], rewards: np.ndarray, cuts: Sequence[Sequence[int]]
    ) -> tuple[list[TrainingRow], XrpoAdvantages]:
        """Rewards -> advantages. Old log-probs are computed only for updates after the first,
        and only for rows that will have a gradient."""
        config = self.config
        rows = make_rows(rollouts, config.icl)
        by_group: dict[int, list[float]] = {}
        for row, reward in zip(rows, rewards, strict=True):
            by_group.setdefault(row.group, []).append(float(reward))
        needs_kl = config.loss.kl_weight > 0
        teaching = {
            group for cut in cuts for group in cut if needs_kl or has_signal(by_group[group])
        }
        trained = [row for row in rows if row.response_ids and row.group in teaching]
        with self.clock("logprob"):
            later = {group for cut in cuts[1:] for group in cut}
            self.updater.fill_old_logprobs([row for row in trained if row.group in later])
            self.updater.fill_reference_logprobs(trained)
        with self.clock("advantage"):
            shaped = shape_advantages(
                rows,
                rollouts,
                rewards,
                loss=config.loss,
                novelty=config.novelty,
                tree=config.tree,
            )
            fill_advantages(
                rows,
                rollouts,
                rewards,
                shaped.advantages.double().numpy(),
                loss=config.loss,
                icl=config.icl,
            )
        return rows, shaped

    def _update(self, rows: Sequence[TrainingRow], cuts: Sequence[Sequence[int]]) -> None:
        with self.clock("update"):
            keeps_all = self.config.loss.kl_weight > 0
            for batch in cut_mini_batches(rows, cuts, keep_all=keeps_all):
                self.updater.apply(batch)

    def _remember(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt], step: int) -> None:
        """Successes into the corpus, after the update: a step never retrieves from itself."""
        if self.exemplars is None:
            return
        # The corpus keeps one success per problem.
        newest = {
            rollout.prompt.index: rollout
            for rollout in rollouts
            if rollout.verdict.solved and not rollout.is_truncated and not rollout.is_seeded
        }
        successes = [
            Success(prompt_index=index, response=own.text, num_tokens=own.num_tokens)
            for index, own in newest.items()
        ]
        self.exemplars.admit(successes, step)
        if self.states is not None:
            for group, prompt in enumerate(prompts):
                own = [r for r in rollouts if r.completion.request.group == group]
                self.states.observe_step(
                    prompt.index,
                    num_solved=sum(r.verdict.solved for r in own),
                    num_scored=sum(r.verdict.reward == r.verdict.reward for r in own),
                    was_seeded=any(r.is_seeded for r in own),
                    epoch=self.sampler.epoch_of(prompt.index),
                )

    def _measure(
        self,
        rollouts: Sequence[Rollout],
        rewards: np.ndarray,
        rows: Sequence[TrainingRow],
        shaped: XrpoAdvantages,
    ) -> dict[str, Any]:
        metrics: dict[str, Any] = {
            "epoch": self.sampler.epoch,
            **rollout_metrics(rollouts, rewards),
        }
        with self.clock("update"):
            metrics.update(self.updater.read_metrics())
        check_finite(metrics, self.steps_done)
        dtypes = (self.engine_dtype, self.policy.compute_dtype)
        check_agreement(metrics, dtypes, self.steps_done)
        if self.config.novelty.enabled:
            metrics.update(novelty_metrics(rows, shaped.bonus.double().numpy()))
        if self.exemplars is not None:
            metrics.update({f"icl/{name}": v for name, v in self.exemplars.stats().items()})
        if self.seeder is not None:
            metrics.update(self.seeder.read_metrics())
        if self.states is not None:
            metrics.update({f"icl/state/{k}": v for k, v in self.states.counts().items()})
        metrics.update(memory_metrics())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything but model, optimizer and random numbers, as JSON values."""
        return {
            "steps_done": self.steps_done,
            "fingerprint": self.prompts.fingerprint,
            "sampler": self.sampler.state_dict(),
            "planner": self.planner.state_dict(),
            "exemplars": self.exemplars.state_dict() if self.exemplars else None,
            "states": self.states.state_dict() if self.states else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where state_dict() was taken.

        Raises:
            ValueError: the data set is another one than that of the checkpoint.
        """
        if state["fingerprint"] != self.prompts.fingerprint:
            raise ValueError(
                f"data.train: expected the data set of the checkpoint (fingerprint "
                f"{state['fingerprint']}), got {self.prompts.fingerprint}; "
                "resume with the same data"
            )
        self.steps_done = state["steps_done"]
        self.sampler.load_state_dict(state["sampler"])
        self.planner.load_state_dict(state["planner"])
        if self.exemplars is not None:
            self.exemplars.load_state_dict(state["exemplars"])
        if self.states is not None:
            self.states.load_state_dict(state["states"])

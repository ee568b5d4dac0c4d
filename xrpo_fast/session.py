"""A training run from its first evaluation to its last table: steps, metrics, checkpoints."""

import json
import logging
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from xrpo_fast.assemble import Parts
from xrpo_fast.checkpoint import latest_checkpoint, load_state, save_checkpoint
from xrpo_fast.config import Config
from xrpo_fast.display import (
    TrainingDisplay,
    accuracy_table,
    curve_text,
    rollout_table,
    save_curve,
    time_table,
)
from xrpo_fast.doctor import first_step_findings
from xrpo_fast.files import replacing, writing
from xrpo_fast.metrics import MetricsWriter, make_trackers, read_metrics, truncate_metrics
from xrpo_fast.records import write_rollouts
from xrpo_fast.run_dir import RunDir
from xrpo_fast.trainer import StepResult

logger = logging.getLogger(__name__)


class NothingTrained(RuntimeError):
    """The run ended without one optimizer update. Exit code 1."""


class Session:
    """Drives the trainer through the run. Each step: train, evaluate, log, save, in this order, so
    that a killed run goes on from its last checkpoint with the same numbers."""

    def __init__(self, config: Config, run: RunDir, parts: Parts, console: Console) -> None:
        self.config = config
        self.run_dir = run
        self.parts = parts
        self.trainer = parts.trainer
        self.console = console
        if parts.checkpoint is not None:
            state, optimizer = load_state(parts.checkpoint)
            self.trainer.load_state_dict(state)
            self.trainer.updater.load_state_dict(optimizer)
            truncate_metrics(run.metrics, self.trainer.steps_done)
            run.drop_rollouts_after(self.trainer.steps_done)
        trackers = make_trackers(config.log.trackers, run.path, config.run.name)
        self.writer = MetricsWriter(run.metrics, trackers)

    def run(self, *, should_stop: Callable[[], bool]) -> bool:
        """Train to the last step; False where it was asked to stop before."""
        last = self.config.run.steps
        trainer = self.trainer
        try:
            with TrainingDisplay(self.console, last, trainer.steps_done) as display:
                if self.parts.checkpoint is None:
                    self.writer.write(0, self._evaluate(display, self.config.eval.final_samples))
                trainer.clock.lap()
                while trainer.steps_done < last and not should_stop():
                    self._step(display)
            is_saved = trainer.steps_done % self.config.checkpoint.every_steps == 0
            if trainer.steps_done == 0 or not is_saved:
                self._save()
        except Exception as error:
            self._add_cure(error)
            raise
        finally:
            self.writer.close()
        is_finished = trainer.steps_done >= last
        if is_finished:
            self._finish()
        return is_finished

    def _add_cure(self, error: Exception) -> None:
        """Notes on what to do, for the message that ends the run."""
        if torch.OutOfMemoryError in (type(error), type(error.__cause__)):
            error.add_note(
                "lower rollout.gpu_memory_fraction, optim.micro_batch_tokens or "
                "rollout.max_concurrent"
            )
        if (found := latest_checkpoint(self.run_dir.path)) is not None:
            error.add_note(f"the last checkpoint stands in {found}, go on from it with --resume")

    def _step(self, display: TrainingDisplay) -> None:
        trainer, config = self.trainer, self.config
        result = trainer.step()
        step = trainer.steps_done
        if config.log.rollouts:
            with trainer.clock("save"):
                self._write_rollouts(step, result)
        result.metrics.update(trainer.clock.lap())
        display.stepped(step, result.metrics)
        if step == 1:
            limit = config.rollout.max_response_tokens
            for finding in first_step_findings(result.metrics, limit):
                logger.warning(finding)
        every = config.eval.every_steps
        is_last = step == config.run.steps
        if is_last or (every and step % every == 0):
            samples = config.eval.final_samples if is_last else config.eval.samples
            result.metrics.update(self._evaluate(display, samples))
            trainer.clock.lap()
        self.writer.write(step, result.metrics)
        # After the line, so that no kill can leave a checkpoint whose line is missing; its seconds
        # count in the next step.
        if step % config.checkpoint.every_steps == 0:
            with trainer.clock("save"):
                self._save()

    def _evaluate(self, display: TrainingDisplay, num_samples: int) -> dict[str, float]:
        """Accuracy on all held-out sets."""
        metrics: dict[str, float] = {}
        config = self.config.eval
        for name, prompts in self.parts.eval_sets.items():
            chosen = prompts[: config.max_prompts or len(prompts)]
            graded = self.parts.evaluator.sample(chosen, num_samples)
            metrics.update(self.parts.evaluator.summarise(name, chosen, graded, config.k))
            display.evaluated(self.trainer.steps_done, name, metrics)
        return metrics

    def _write_rollouts(self, step: int, result: StepResult) -> None:
        write_rollouts(
            self.run_dir.rollouts(step),
            step,
            result.rollouts,
            result.shaped,
            num_texts=self.config.log.rollout_text,
        )

    def _save(self) -> None:
        save_checkpoint(
            self.run_dir.checkpoints,
            self.trainer.steps_done,
            policy=self.trainer.policy,
            optimizer_state=self.trainer.updater.state_dict(),
            state=self.trainer.state_dict(),
            keep=self.config.checkpoint.keep,
        )
        self._write_exemplar_report()

    def _finish(self) -> None:
        """Tables, learning curve, report; an error where nothing was trained."""
        if self.trainer.updater.num_updates == 0:
            raise NothingTrained(
                f"run: expected at least one optimizer update in {self.config.run.steps} steps, "
                "got none: every group had equal rewards in every step; use easier data, another "
                "reward or more rollouts"
            )
        rows = read_metrics(self.run_dir.metrics)
        steps = [row for row in rows if row["step"] > 0]
        for name in self.parts.eval_sets:
            evals = [row for row in rows if f"eval/{name}/pass@1" in row]
            self.console.print(accuracy_table(evals[0], evals[-1], name))
            points = [(row["step"], row[f"eval/{name}/pass@1"]) for row in evals]
            self.console.print(curve_text(points), markup=False, highlight=False)
            save_curve(self.run_dir.path / f"learning_curve_{name}.png", evals, steps, name)
        self.console.print(rollout_table(steps))
        self.console.print(time_table(steps))
        self._report()

    def _write_exemplar_report(self) -> None:
        """exemplars.json: what the leakage guard refused, and prompts that never succeed."""
        trainer = self.trainer
        if trainer.exemplars is None:
            return
        suspects = trainer.states.quarantine() if trainer.states is not None else []
        found = {
            "leakage": trainer.exemplars.leakage_report(),
            "suspect_prompts": [trainer.prompts[index].id for index in suspects],
        }
        path = self.run_dir.path / "exemplars.json"
        with writing(path), replacing(path) as temporary:
            temporary.write_text(json.dumps(found, indent=1))

    def _report(self) -> None:
        from xrpo_fast.report import write_report

        path = write_report([self.run_dir.path], self.run_dir.path / "report.html")
        self._say(f"report: {path}")
        self._say(f"model:  {self.run_dir.checkpoints / f'step_{self.trainer.steps_done}'}")

    def _say(self, text: Any) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

"""What a study consists of: its file, its runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt

from xrpo_fast.config import Config, Section


class StudyFile(Section):
    base: Path
    """Config that all arms start from, relative to the study file."""
    output_dir: Path
    """Where configs, logs, run folders and results are written."""
    seeds: list[NonNegativeInt] = Field(min_length=1)
    """run.seed of each arm's runs; also {seed} in [per_seed]."""
    reference: str = ""
    """Arm that the others are compared to; empty: the first."""
    targets: list[float] = Field(default_factory=lambda: [0.5, 0.75, 0.9])
    """Accuracies whose cost is reported: steps, rollouts, tokens, seconds."""
    eval_set: str = "heldout"
    """Held-out set that is reported."""
    parallel: int = Field(default=1, ge=1)
    """Runs at a time, each in its own process."""
    common: dict[str, Any] = Field(default_factory=dict)
    """Keys of a config, for all arms. A table such as data.eval replaces the base's."""
    per_seed: dict[str, Any] = Field(default_factory=dict)
    """Keys of a config whose text holds {seed}."""
    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    """Keys of a config per arm; `seeds = N` limits the arm to the first N seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One arm with one seed."""

    arm: str
    seed: int
    config: Config

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.config.run.output_dir / self.config.run.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A study file, resolved."""

    file: StudyFile
    runs: list[PlannedRun]
    """Seed by seed, so that a study that is broken off still compares paired runs."""

    @property
    def arms(self) -> list[str]:
        return list(self.file.arms)

    @property
    def reference(self) -> str:
        return self.file.reference or self.arms[0]

    def config_of(self, arm: str) -> Config:
        """Configuration of an arm's first run."""
        return next(run.config for run in self.runs if run.arm == arm)

"""STUDY.toml -> the runs that it asks for, every configuration resolved and compared beforehand.

    base config and its preset  <  [common]  <  [per_seed]  <  [arms.NAME]

An arm's keys are those of a config file, as "section.key" or as tables.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, ValidationError

from xrpo_fast.config import Config, ConfigError, Section
from xrpo_fast.config_file import make_config, set_key
from xrpo_fast.inputs import eval_sources

PLACEHOLDER = "{seed}"
SET_BY_STUDY = ("run.name", "run.seed", "run.output_dir")
EQUAL_SECTIONS = ("model", "data", "reward", "eval")
"""What is trained on and how it is graded: whole sections in which arms may not differ."""
EQUAL_KEYS = ("run.steps", "rollout.max_response_tokens", "rollout.temperature")
FREE_KEYS = ("reward.workers", "reward.timeout_s", "model.gradient_checkpointing")
"""Of those sections, what changes speed or memory alone."""
SPEED_KEYS = ("rollout.engine", "rollout.engine_dtype", "run.device", "run.threads")
"""Arms that differ in one of these are not compared in seconds."""


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
    """Keys of a config, for all arms."""
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


def load_study(path: str | Path) -> Study:
    """Read a study file and build the configuration of every run.

    Raises:
        ConfigError: a file cannot be read, a key is unknown or out of range, or the arms would not
            be comparable; the message names arm and key.
    """
    path = Path(path)
    file = _parse(_read_toml(path, "study"))
    base = _read_toml(path.parent / file.base, "base")
    seeds_of = {arm: _arm_seeds(arm, values, file) for arm, values in file.arms.items()}
    runs = [
        PlannedRun(arm=arm, seed=seed, config=_resolve(file, base, arm, seed))
        for seed in file.seeds
        for arm in file.arms
        if seed in seeds_of[arm]
    ]
    study = Study(file=file, runs=runs)
    _check_eval_set(study)
    _check_comparable(study)
    _check_parallel(study)
    return study


def speed_differences(study: Study) -> dict[str, str]:
    """Arms whose seconds are not those of the reference's engine or threads -> a sentence why."""
    reference = study.config_of(study.reference)
    found = {}
    for arm in study.arms:
        config = study.config_of(arm)
        differing = [key for key in SPEED_KEYS if _get(config, key) != _get(reference, key)]
        if differing:
            listing = ", ".join(
                f"{key} = {_get(config, key)!r} (there {_get(reference, key)!r})"
                for key in differing
            )
            found[arm] = f"{arm}: seconds are not compared to {study.reference}'s: {listing}."
    return found


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(section.key, value) of nested tables; keys may hold dots already."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_toml(path: Path, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{what}: expected an existing file, got {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{what}: expected a TOML file, got {path}: {error}") from None


def _parse(values: Mapping[str, Any]) -> StudyFile:
    try:
        file = StudyFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_message(item) for item in error.errors())) from None
    for arm in file.arms:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", arm):
            raise ConfigError(
                f"arms: expected names of letters, digits, '_', '.' and '-' (they name folders), "
                f"got {arm!r}"
            )
    if file.reference and file.reference not in file.arms:
        close = difflib.get_close_matches(file.reference, list(file.arms), n=1, cutoff=0)
        raise ConfigError(
            f"reference: expected an arm, got {file.reference!r}; did you mean {close[0]!r}?"
        )
    if len(set(file.seeds)) < len(file.seeds):
        raise ConfigError(f"seeds: expected different numbers, got {file.seeds}")
    for target in file.targets:
        if not 0 < target <= 1:
            raise ConfigError(f"targets: expected accuracies in (0, 1], got {target}")
    for key, value in flat_keys(file.per_seed):
        if not isinstance(value, str) or PLACEHOLDER not in value:
            raise ConfigError(
                f"per_seed.{key}: expected a text that holds {PLACEHOLDER}, got {value!r}; what is "
                "the same for all seeds belongs in [common]"
            )
    return file


def _message(item: Any) -> str:
    """One error of pydantic: key, expected, got, cure."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, list(StudyFile.model_fields), n=1, cutoff=0)
        return f"{key}: unknown key in the study file; did you mean {close[0]}?"
    if item["type"] == "missing":
        return (
            f"{key}: expected a value, got none; a study file needs base, output_dir, seeds, arms"
        )
    expected = re.sub(r"^(Input should be|\w+ should have) ", "", item["msg"])
    return f"{key}: expected {expected}, got {item['input']!r}"


def _arm_seeds(arm: str, values: Mapping[str, Any], file: StudyFile) -> Sequence[int]:
    number = values.get("seeds", len(file.seeds))
    if not isinstance(number, int) or not 1 <= number <= len(file.seeds):
        raise ConfigError(
            f"arms.{arm}.seeds: expected how many of the study's {len(file.seeds)} seeds the arm "
            f"runs with, got {number!r}"
        )
    return file.seeds[:number]


def _resolve(file: StudyFile, base: Mapping[str, Any], arm: str, seed: int) -> Config:
    """The configuration of one run."""
    values = deepcopy(dict(base))
    own = {key: value for key, value in flat_keys(file.arms[arm]) if key != "seeds"}
    given = own.keys() | dict(flat_keys(file.common)).keys() | dict(flat_keys(file.per_seed)).keys()
    if taken := [key for key in SET_BY_STUDY if key in given]:
        raise ConfigError(f"arms.{arm}: expected no {taken[0]}, which the study sets for each run")
    seeded = {key: text.replace(PLACEHOLDER, str(seed)) for key, text in flat_keys(file.per_seed)}
    named = {
        "run.name": f"{arm}-seed{seed}",
        "run.seed": seed,
        "run.output_dir": str(file.output_dir),
    }
    for key, value in [*flat_keys(file.common), *seeded.items(), *own.items(), *named.items()]:
        set_key(values, key, value)
    try:
        return make_config(values)
    except ConfigError as error:
        raise ConfigError(f"arms.{arm}: {error}") from None


def _check_eval_set(study: Study) -> None:
    names = list(eval_sources(study.runs[0].config))
    if study.file.eval_set not in names:
        raise ConfigError(
            f"eval_set: expected one of the base config's held-out sets "
            f"({', '.join(names) or 'it has none: set data.eval'}), got {study.file.eval_set!r}"
        )


def _check_comparable(study: Study) -> None:
    """Runs of one seed must differ in how they learn, and in nothing else."""
    first = {run.seed: run for run in reversed(study.runs)}
    for run in study.runs:
        other = first[run.seed]
        ours, theirs = _must_be_equal(run.config), _must_be_equal(other.config)
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise ConfigError(
                    f"arms.{run.arm}: expected {key} = {theirs.get(key)!r} as in arms.{other.arm}, "
                    f"got {ours.get(key)!r}; arms are compared at equal {key}"
                )


def _must_be_equal(config: Config) -> dict[str, Any]:
    dumped = config.model_dump(mode="json")
    values = dict(flat_keys({section: dumped[section] for section in EQUAL_SECTIONS}))
    values |= {key: _get(config, key) for key in EQUAL_KEYS}
    values["rollout.prompts_per_step x rollout.rollouts_per_prompt"] = config.total_rollouts
    return {key: value for key, value in values.items() if key not in FREE_KEYS}


def _check_parallel(study: Study) -> None:
    for run in study.runs:
        if study.file.parallel > 1 and run.config.run.threads == 0:
            raise ConfigError(
                f"parallel: expected run.threads to be set where runs share the processor, but "
                f"arms.{run.arm} leaves it at 0 (all cores); set it in [common]"
            )


def _get(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)

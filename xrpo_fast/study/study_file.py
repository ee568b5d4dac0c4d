"""STUDY.toml -> the runs that it asks for, every configuration resolved and compared beforehand.

    base config and its preset  <  [common]  <  [per_seed]  <  [arms.NAME]

An arm's keys are those of a config file, as "section.key" or as tables. Each key is set whole: a
table of held-out sets, data.eval, replaces the one before it.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xrpo_fast.config import Config, ConfigError
from xrpo_fast.config_file import make_config, set_key
from xrpo_fast.run_dir import flat_keys
from xrpo_fast.study.fairness import check_study
from xrpo_fast.study.plan import PlannedRun, Study, StudyFile

PLACEHOLDER = "{seed}"
SET_BY_STUDY = ("run.name", "run.seed", "run.output_dir")


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
    return check_study(Study(file=file, runs=runs))


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
        if _fill(value, 0) == value:
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
    seeded = {key: _fill(value, seed) for key, value in flat_keys(file.per_seed)}
    named = {
        "run.name": f"{arm}-seed{seed}",
        "run.seed": seed,
        "run.output_dir": str(file.output_dir),
    }
    for key, value in [*flat_keys(file.common), *seeded.items(), *own.items(), *named.items()]:
        # A copy, so that no key set below a table changes the study file's own.
        set_key(values, key, deepcopy(value))
    try:
        return make_config(values)
    except ConfigError as error:
        raise ConfigError(f"arms.{arm}: {error}") from None


def _fill(value: Any, seed: int) -> Any:
    """A text, or the texts of a table, with the seed in place."""
    if isinstance(value, Mapping):
        return {key: _fill(item, seed) for key, item in value.items()}
    return value.replace(PLACEHOLDER, str(seed)) if isinstance(value, str) else value

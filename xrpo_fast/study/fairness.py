"""Whether the arms of a study may be compared: equal budget, data, model and evaluation."""

from typing import Any

from xrpo_fast.config import Config, ConfigError
from xrpo_fast.inputs import eval_sources
from xrpo_fast.run_dir import flat_keys
from xrpo_fast.study.plan import Study

EQUAL_SECTIONS = ("model", "data", "reward", "eval")
"""What is trained on and how it is graded: whole sections in which arms may not differ."""
EQUAL_KEYS = ("run.steps", "rollout.max_response_tokens", "rollout.temperature")
FREE_KEYS = ("reward.workers", "reward.timeout_s", "model.gradient_checkpointing")
"""Of those sections, what changes speed or memory alone."""
SPEED_KEYS = ("rollout.engine", "rollout.engine_dtype", "run.device", "run.threads")
"""Arms that differ in one of these are not compared in seconds."""


def check_study(study: Study) -> Study:
    """The study itself; ConfigError, which names arm and key, where its arms cannot be compared."""
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

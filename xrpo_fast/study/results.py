"""The finished runs of a study -> what is compared: arms, differences, ratios, and notes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xrpo_fast.metrics import read_metrics
from xrpo_fast.study.fairness import speed_differences
from xrpo_fast.study.measure import (
    PAIRED_MECHANISMS,
    UNITS,
    Cost,
    Measured,
    Row,
    measure,
    target_text,
)
from xrpo_fast.study.plan import Study
from xrpo_fast.study.resampling import (
    Estimate,
    MeanCost,
    Ratio,
    difference,
    estimate,
    mean_cost,
    ratio,
)
from xrpo_fast.study.state import RunState

FEW_SEEDS = 5
MOST_OF_BUDGET = 0.99
"""Share of the budget from which an arm counts as spending it: data sets end in shorter steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """One arm over its finished seeds."""

    name: str
    runs: list[Measured]
    """By seed, ascending as in the study file."""
    final: dict[str, Estimate]
    costs: dict[str, dict[str, MeanCost]]
    """unit -> target -> cost; no seconds where they do not compare with the reference's."""
    mechanisms: dict[str, Estimate]
    differences: dict[str, Estimate] = field(default_factory=dict)
    """This arm's final numbers minus the reference's, paired; empty for the reference."""
    mechanism_differences: dict[str, Estimate] = field(default_factory=dict)
    """The same of PAIRED_MECHANISMS, where both arms have the number."""
    ratios: dict[str, dict[str, Ratio]] = field(default_factory=dict)
    """unit -> target -> cost of the reference : cost of this arm."""

    @property
    def seeds(self) -> set[int]:
        return {run.seed for run in self.runs}


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """All that is finished, and what a reader must know of the rest."""

    reference: str
    num_steps: int
    budget: int
    """Rollouts per step that every arm may spend."""
    targets: list[str]
    eval_set: str
    arms: list[ArmResult]
    missing: list[str]
    """Runs that are not in the numbers, each with the reason."""
    notes: list[str]

    @property
    def final_names(self) -> list[str]:
        """Final numbers for tables and figures: pass@1, pass of few samples, consensus of many,
        tiers, other sets. The other k of pass@k and cons@k are in results.json alone."""
        names = list(dict.fromkeys(name for arm in self.arms for name in arm.final))
        passes = sorted((n for n in names if n.startswith("pass@")), key=_k)
        votes = sorted((n for n in names if n.startswith("cons@")), key=_k)
        rest = [n for n in names if n not in passes and n not in votes]
        return passes[:2] + votes[-1:] + rest


def collect(study: Study, states: Mapping[str, RunState]) -> Results:
    """Measure what is finished; whatever cannot be measured is listed, never left out silently."""
    measured: list[Measured] = []
    missing: list[str] = []
    notes: list[str] = []
    for run in study.runs:
        state = states[run.name]
        if state.kind != "finished":
            missing.append(f"{run.name}: {_reason(state, run.config.run.steps)}")
            continue
        try:
            rows = read_metrics(run.path / "metrics.jsonl")
            notes += _budget_notes(run.name, rows, run.config.total_rollouts)
            measured.append(
                measure(
                    rows,
                    arm=run.arm,
                    seed=run.seed,
                    eval_set=study.file.eval_set,
                    targets=study.file.targets,
                )
            )
        except (OSError, ValueError) as error:
            missing.append(f"{run.name}: cannot be read ({error})")
    return summarise(study, measured, missing, notes)


def summarise(
    study: Study, measured: list[Measured], missing: list[str], notes: list[str]
) -> Results:
    """Arms in the study's order, each beside the reference."""
    by_arm = {arm: [run for run in measured if run.arm == arm] for arm in study.arms}
    reference = by_arm[study.reference]
    unlike = speed_differences(study)
    notes = [*unlike.values(), *notes]
    arms = [
        _arm(arm, runs, reference if arm != study.reference else [], arm not in unlike)
        for arm, runs in by_arm.items()
        if runs
    ]
    if not reference:
        notes = [*notes, f"{study.reference}, the reference, has no finished run: no differences."]
    fewest = min((len(arm.runs) for arm in arms), default=0)
    if arms and fewest < FEW_SEEDS:
        notes = [
            *notes,
            f"An arm with fewer than {FEW_SEEDS} seeds has too narrow an interval: with two or "
            "three it is their range.",
        ]
    config = study.runs[0].config
    notes = [*notes, *_saving_notes(arms, config.total_rollouts)]
    return Results(
        reference=study.reference,
        num_steps=config.run.steps,
        budget=config.total_rollouts,
        targets=[target_text(target) for target in study.file.targets],
        eval_set=study.file.eval_set,
        arms=arms,
        missing=missing,
        notes=notes,
    )


def _k(name: str) -> int:
    return int(name.partition("@")[2])


def _arm(name: str, runs: list[Measured], others: list[Measured], has_seconds: bool) -> ArmResult:
    """One arm; `others` are the reference's runs, empty for the reference itself."""
    final = _by_name([(run.seed, run.final) for run in runs])
    mechanisms = _by_name([(run.seed, run.mechanisms) for run in runs])
    units = [unit for unit in UNITS if unit != "seconds" or has_seconds]
    ratios = {
        unit: {
            target: ratio(_costs(others, unit, target), _costs(runs, unit, target))
            for target in runs[0].costs[unit]
        }
        for unit in units
    }
    return ArmResult(
        name=name,
        runs=runs,
        final={key: estimate(values) for key, values in final.items()},
        costs={
            unit: {target: mean_cost(_costs(runs, unit, target)) for target in runs[0].costs[unit]}
            for unit in units
        },
        mechanisms={key: estimate(values) for key, values in mechanisms.items()},
        differences=_gaps(final, _by_name([(run.seed, run.final) for run in others])),
        mechanism_differences=_gaps(
            {key: mechanisms[key] for key in PAIRED_MECHANISMS if key in mechanisms},
            _by_name([(run.seed, run.mechanisms) for run in others]),
        ),
        ratios={
            unit: {target: found for target, found in by_target.items() if found is not None}
            for unit, by_target in ratios.items()
        },
    )


def _by_name(values: list[tuple[int, dict[str, float]]]) -> dict[str, dict[int, float]]:
    """name -> seed -> number."""
    names = dict.fromkeys(name for _, found in values for name in found)
    return {name: {seed: v[name] for seed, v in values if name in v} for name in names}


def _gaps(
    ours: dict[str, dict[int, float]], theirs: dict[str, dict[int, float]]
) -> dict[str, Estimate]:
    """Ours minus theirs by name, paired by seed, where both have the number."""
    gaps = {name: difference(ours[name], theirs[name]) for name in ours if name in theirs}
    return {name: gap for name, gap in gaps.items() if gap is not None}


def _costs(runs: list[Measured], unit: str, target: str) -> dict[int, Cost]:
    return {run.seed: run.costs[unit][target] for run in runs}


def _budget_notes(name: str, rows: Sequence[Row], budget: int) -> list[str]:
    """A note where a run spent more rollouts in a step than its budget."""
    over = [row["step"] for row in rows if (row.get("planner/rollouts") or 0) > budget]
    return (
        [f"{name}: spent more than {budget} rollouts in {len(over)} steps, first in {over[0]}."]
        if over
        else []
    )


def _saving_notes(arms: list[ArmResult], budget: int) -> list[str]:
    """Notes on arms that leave a part of the budget unspent."""
    spent = {arm.name: arm.mechanisms["rollouts_per_step"].mean for arm in arms}
    return [
        f"{arm}: spent {mean:.0f} of {budget} rollouts a step on average; its rollouts to a target "
        "say more than its steps."
        for arm, mean in spent.items()
        if mean < MOST_OF_BUDGET * budget
    ]


def _reason(state: RunState, num_steps: int) -> str:
    if state.has_failed:
        return f"failed with exit code {state.exit_code}; its log in logs/ says why"
    return {
        "new": "not run yet",
        "early": "broken off before its first checkpoint",
        "partial": f"broken off; its last checkpoint is of step {state.steps_done} of {num_steps}",
        "unreadable": f"cannot be read ({state.reason})",
    }[state.kind]

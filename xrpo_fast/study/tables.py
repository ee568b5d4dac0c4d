"""results.md: the tables that a reader sees first."""

from collections.abc import Callable, Sequence
from functools import partial

from rich.table import Table

from xrpo_fast.study.measure import MECHANISMS, PAIRED_MECHANISMS, UNITS
from xrpo_fast.study.resampling import Estimate, MeanCost
from xrpo_fast.study.results import ArmResult, Results
from xrpo_fast.study.texts import (
    NONE,
    cost_text,
    interval_text,
    markdown_table,
    ratio_text,
    signed,
    three,
)

PLACES = {"answer_tokens": 1, "rollouts_per_step": 0}
TIERS = {"vhard": "very hard"}


def to_markdown(results: Results, title: str) -> str:
    """All tables of a study, what is missing, and how to read them."""
    parts = [f"# {title}", _opening(results)]
    if results.missing:
        parts.append("**Not in the numbers:**\n\n" + _bullets(results.missing))
    if results.notes:
        parts.append("**Notes:**\n\n" + _bullets(results.notes))
    if not results.arms:
        return "\n\n".join([*parts, "No run is finished.", ""])
    parts += [
        "## At the end",
        _final_table(results),
        _tier_table(results),
        "## What a target accuracy cost",
        _cost_tables(results),
        f"## What a target accuracy cost, {results.reference} : other",
        _ratio_tables(results),
        f"## Differences to {results.reference}",
        _difference_table(results),
        "## Mechanisms",
        _mechanism_table(results),
        _mechanism_difference_table(results),
        "## Each seed",
        _seed_table(results),
        "## How to read this",
        _reading(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def overview(results: Results) -> Table:
    """What the console shows: one line per arm; results.md has the rest."""
    table = Table(title=f"{results.reference} and the others", title_justify="left")
    table.add_column("arm", no_wrap=True)
    for column in ("seeds", "pass@1", f"minus {results.reference}"):
        table.add_column(column, justify="right")
    for target in results.targets:
        table.add_column(f"steps to {target}", justify="right")
    for arm in results.arms:
        table.add_row(
            arm.name,
            str(len(arm.runs)),
            three(arm.final["pass@1"].mean),
            _estimate(arm.differences.get("pass@1"), signed),
            *(_mean_text(arm.costs["steps"][target]) for target in results.targets),
        )
    return table


def name_of(metric: str) -> str:
    """A final number's name as a reader knows it."""
    if metric.startswith("tier/"):
        tier = metric.removeprefix("tier/")
        return f"{TIERS.get(tier, tier)} tier"
    return metric


def _opening(results: Results) -> str:
    return (
        f"{results.num_steps} steps of at most {results.budget} rollouts per arm and seed; "
        f"held-out set `{results.eval_set}`. Means over seeds with 95 % intervals."
    )


def _final_table(results: Results) -> str:
    names = [name for name in results.final_names if not name.startswith("tier/")]
    targets = [f"steps to {target}" for target in results.targets]
    rows = [
        [
            arm.name,
            str(len(arm.runs)),
            *(_estimate(arm.final.get(name), three) for name in names),
            *(cost_text(arm.costs["steps"][target], "steps") for target in results.targets),
        ]
        for arm in results.arms
    ]
    return markdown_table(["arm", "seeds", *map(name_of, names), *targets], rows)


def _tier_table(results: Results) -> str:
    names = [name for name in results.final_names if name.startswith("tier/")]
    rows = [
        [arm.name, *(_estimate(arm.final.get(name), three) for name in names)]
        for arm in results.arms
    ]
    return markdown_table(["pass@1", *map(name_of, names)], rows) if names else ""


def _cost_tables(results: Results) -> str:
    return "\n\n".join(
        markdown_table(
            [f"to {target}", *UNITS.values()],
            [[arm.name, *(_cost(arm, unit, target) for unit in UNITS)] for arm in results.arms],
        )
        for target in results.targets
    )


def _cost(arm: ArmResult, unit: str, target: str) -> str:
    return cost_text(arm.costs[unit][target], unit) if unit in arm.costs else NONE


def _ratio_tables(results: Results) -> str:
    others = [arm for arm in results.arms if arm.ratios]
    parts = []
    for target in results.targets:
        rows = [
            [f"{results.reference} : {arm.name}"] + [_ratio(arm, unit, target) for unit in UNITS]
            for arm in others
            if any(target in found for found in arm.ratios.values())
        ]
        if rows:
            parts.append(markdown_table([f"to {target}", *UNITS.values()], rows))
    return "\n\n".join(parts)


def _ratio(arm: ArmResult, unit: str, target: str) -> str:
    found = arm.ratios.get(unit, {}).get(target)
    return ratio_text(found) if found else NONE


def _difference_table(results: Results) -> str:
    names = results.final_names
    rows = [
        [arm.name, *(_estimate(arm.differences.get(name), signed) for name in names)]
        for arm in results.arms
        if arm.differences
    ]
    return (
        markdown_table([f"arm minus {results.reference}", *map(name_of, names)], rows)
        if rows
        else ""
    )


def _mechanism_table(results: Results) -> str:
    shown = [name for name in MECHANISMS if any(name in arm.mechanisms for arm in results.arms)]
    rows = [
        [
            arm.name,
            *(_estimate(arm.mechanisms.get(name), partial(_mechanism, name)) for name in shown),
        ]
        for arm in results.arms
    ]
    return markdown_table(["arm", *(MECHANISMS[name] for name in shown)], rows)


def _mechanism_difference_table(results: Results) -> str:
    rows = [
        [
            arm.name,
            *(
                _estimate(arm.mechanism_differences.get(name), partial(_mechanism, name, sign="+"))
                for name in PAIRED_MECHANISMS
            ),
        ]
        for arm in results.arms
        if arm.mechanism_differences
    ]
    header = [
        f"arm minus {results.reference}",
        *(MECHANISMS[name] for name in PAIRED_MECHANISMS),
    ]
    return markdown_table(header, rows) if rows else ""


def _mechanism(name: str, value: float, sign: str = "") -> str:
    return f"{value:{sign},.{PLACES.get(name, 3)}f}"


def _seed_table(results: Results) -> str:
    names = results.final_names
    rows = [
        [
            arm.name,
            str(run.seed),
            *(three(run.final[name]) if name in run.final else NONE for name in names),
            *(
                ("" if cost.is_reached else "> ") + f"{cost.value:.0f}"
                for cost in (run.costs["steps"][target] for target in results.targets)
            ),
        ]
        for arm in results.arms
        for run in arm.runs
    ]
    targets = [f"steps to {target}" for target in results.targets]
    return markdown_table(["arm", "seed", *map(name_of, names), *targets], rows)


def _reading(results: Results) -> str:
    return _bullets(
        [
            "Intervals: percentile bootstrap over seeds; differences and ratios draw the same "
            "seeds for both arms.",
            "A target is crossed on the straight line between two evaluations. `>`: not reached in "
            "all seeds; what was spent without reaching it is a lower bound.",
            f"Ratios below 1 speak for {results.reference}: mean cost of the seeds that both arms "
            "ran. `<` and `>`: bounds, where an arm did not get there in all seeds.",
            "Seconds are wall-clock seconds of training steps, on the machine as busy as it was; "
            "evaluations and loading are not in them. Rollouts and tokens are all that were "
            "generated for training, discarded ones included.",
            "Mechanisms are means over all steps; answer length is of the last evaluation.",
        ]
    )


def _estimate(found: Estimate | None, number: Callable[[float], str]) -> str:
    return interval_text(found, number) if found else NONE


def _mean_text(cost: MeanCost) -> str:
    return f"{'> ' if cost.is_bound else ''}{cost.mean:.0f}"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)

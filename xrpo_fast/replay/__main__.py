"""python -m xrpo_fast.replay RUN_DIR_OR_PARQUET --planner uniform,paper --exploration 0.01,0.1,1
python -m xrpo_fast.replay --synthetic

Prints a table and saves it as JSON and CSV next to the log (or where -o says).
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from xrpo_fast.replay.simulate import (
    METRICS,
    PLANNERS,
    USES_EXPLORATION,
    Rule,
    bootstrap,
    simulate,
    summary,
)
from xrpo_fast.replay.worlds import (
    Step,
    WorldError,
    read_log,
    synthetic_history,
    synthetic_step,
)

Interval = tuple[float, float, float]
Row = tuple[str, dict[str, Interval]]

SYNTHETIC_RULES = [
    Rule("uniform", label="uniform"),
    Rule("paper", {"exploration": 1.0, "base_rollouts": 4}, label="XRPO lambda 1"),
    Rule("paper", {"exploration": 0.1, "base_rollouts": 4}, label="XRPO lambda 0.1"),
    Rule("paper", {"exploration": 0.01, "base_rollouts": 4}, label="XRPO lambda 0.01"),
    Rule("paper", {"exploration": 0.1, "base_rollouts": 4}, label="XRPO 0.1, seeding odds x3"),
    Rule("history", {"base_rollouts": 1, "rounds": 3}, label="Beta yield with history"),
    Rule("neyman", label="oracle Neyman"),
]
SEEDED_LABEL = "XRPO 0.1, seeding odds x3"
SEEDING_ODDS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a bad log or option."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.log is None) != options.synthetic:
        parser.error("expected a run folder or parquet file, or --synthetic")
    console = Console()
    try:
        if options.synthetic:
            rows = synthetic_rows(options.bootstrap, options.seed)
            where = options.output or Path("replay_synthetic")
            title = f"256 prompts, mean 8 rollouts, {options.bootstrap} draws of the mixture"
        else:
            steps = _spread(read_log(options.log), options.max_steps)
            rules = parse_rules(options.planner, options.exploration, options.rounds)
            rows = replay_rows(rules, steps, options)
            where = options.output or _beside(options.log)
            title = f"{options.log}: {len(steps)} steps, {options.bootstrap} bootstrap replicates"
    except WorldError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    console.print(render(rows, title))
    try:
        paths = save(rows, where)
    except OSError as error:
        print(f"replay: --output: expected to write {where}.*, got {error}", file=sys.stderr)
        return 2
    for path in paths:
        console.print(f"saved {path}")
    return 0


def synthetic_rows(num_draws: int, seed: int) -> list[Row]:
    """The rules over `num_draws` draws of the synthetic mixture."""
    results: dict[str, list[np.ndarray]] = {rule.label: [] for rule in SYNTHETIC_RULES}
    for draw in range(seed, seed + num_draws):
        step = synthetic_step(draw)
        for rule in SYNTHETIC_RULES:
            is_seeded = rule.label == SEEDED_LABEL
            world = replace(step, seeding_odds=SEEDING_ODDS) if is_seeded else step
            priors = synthetic_history(step, draw) if rule.name == "history" else None
            results[rule.label].append(simulate(rule, [world], seed=draw, priors=priors)[0])
    rng = np.random.default_rng(seed)
    rows = []
    for label, values in results.items():
        table = np.array(values)
        # 95 % interval of the mean over draws.
        chosen = rng.integers(num_draws, size=(1000, num_draws))
        rows.append((label, summary(table, np.nanmean(table[chosen], axis=1))))
    return rows


def replay_rows(rules: list[Rule], steps: Sequence[Step], options: argparse.Namespace) -> list[Row]:
    """One row per rule; rules are paired: they meet the same luck and the same steps."""
    rows = []
    for rule in track(rules, description="replaying", transient=True):
        result = bootstrap(
            rule,
            steps,
            num_replicates=options.bootstrap,
            seed=options.seed,
            base_rollouts=options.base,
        )
        rows.append((rule.label, result))
    return rows


def parse_rules(planners: str, explorations: str, rounds: int) -> list[Rule]:
    """Every planner named, once per lambda where it has one."""
    try:
        weights = [float(part) for part in explorations.split(",")]
    except ValueError:
        raise WorldError(
            f"--exploration: expected numbers with commas between, got {explorations!r}"
        ) from None
    rules = []
    for name in planners.split(","):
        if name not in PLANNERS:
            raise WorldError(f"--planner: expected some of {', '.join(PLANNERS)}, got {name!r}")
        base = Rule(name, {"rounds": rounds}, label=name)
        if name not in USES_EXPLORATION:
            rules.append(base)
            continue
        rules += [
            replace(base, options=base.options | {"exploration": w}, label=f"{name} lambda {w:g}")
            for w in weights
        ]
    return rules


def render(rows: Sequence[Row], title: str) -> Table:
    """mean [low, high] per step, 95 %."""
    table = Table(title=title, caption="mean per step [95 % interval]")
    table.add_column("planner")
    shown = [name for name in METRICS if any(row[1][name][0] > 0 for row in rows)]
    for name in shown:
        table.add_column(METRICS[name], justify="right")
    for label, result in rows:
        table.add_row(label, *(_cell(*result[name]) for name in shown))
    return table


def _cell(mean: float, low: float, high: float) -> str:
    if low == high:
        return _number(mean)
    return f"{_number(mean)} [{_number(low)}, {_number(high)}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def save(rows: Sequence[Row], where: Path) -> list[Path]:
    """WHERE.json and WHERE.csv."""
    where.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_csv = where.with_suffix(".json"), where.with_suffix(".csv")
    bounds = ("mean", "low", "high")
    as_json.write_text(
        json.dumps(
            [
                {"planner": label}
                | {
                    name: {
                        bound: None if np.isnan(value) else value
                        for bound, value in zip(bounds, result[name], strict=True)
                    }
                    for name in METRICS
                }
                for label, result in rows
            ],
            indent=2,
        )
        + "\n"
    )
    with as_csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["planner", *(f"{name}_{bound}" for name in METRICS for bound in bounds)])
        for label, result in rows:
            writer.writerow([label, *(value for name in METRICS for value in result[name])])
    return [as_json, as_csv]


def _beside(log: Path) -> Path:
    return log / "replay" if log.is_dir() else log.with_name(f"{log.stem}_replay")


def _spread(steps: Sequence[Step], most: int) -> Sequence[Step]:
    """At most `most` steps, evenly spaced."""
    if len(steps) <= most:
        return steps
    return [steps[round(i)] for i in np.linspace(0, len(steps) - 1, most)]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m xrpo_fast.replay", description=__doc__)
    parser.add_argument("log", type=Path, nargs="?", help="run folder, or parquet file of rollouts")
    parser.add_argument("--synthetic", action="store_true", help="simulated prompts, no log")
    parser.add_argument(
        "--planner", default="uniform,paper", help=f"with commas: {', '.join(PLANNERS)}"
    )
    parser.add_argument("--exploration", default="0.01,0.1,1", help="lambdas, with commas")
    parser.add_argument("--bootstrap", type=_positive, default=200, help="replicates")
    parser.add_argument("--base", type=_positive, help="base rollouts; default: half the mean")
    parser.add_argument("--rounds", type=_positive, default=2, help="rounds after the base")
    parser.add_argument("--max-steps", type=_positive, default=50, help="evenly spaced steps used")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, help="where to save, without suffix")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""How numbers of a study are written: intervals, bounds, units, and rows of Markdown."""

from collections.abc import Callable, Sequence

from xrpo_fast.study.resampling import Estimate, MeanCost, Ratio

NONE = "-"
"""Where an arm has no such number."""


def interval_text(found: Estimate, number: Callable[[float], str]) -> str:
    """mean [low, high], or the mean alone where there is one seed."""
    if found.low is None or found.high is None:
        return number(found.mean)
    return f"{number(found.mean)} [{number(found.low)}, {number(found.high)}]"


def cost_text(cost: MeanCost, unit: str) -> str:
    """'62 [58, 66]'; '> 93 (2 of 5 seeds never)' where a seed did not get there."""
    if cost.is_bound:
        missed = sum(not c.is_reached for c in cost.by_seed.values())
        if missed == len(cost.by_seed):
            return f"> {amount(cost.mean, unit)}"
        return f"> {amount(cost.mean, unit)} ({missed} of {len(cost.by_seed)} never)"
    text = amount(cost.mean, unit)
    if cost.low is None or cost.high is None:
        return text
    return f"{text} [{amount(cost.low, unit)}, {amount(cost.high, unit)}]"


def ratio_text(found: Ratio) -> str:
    """'0.71 [0.62, 0.80]'; '< 0.71 [< 0.80]' where the other missed the target, '> ...' where ours
    did."""
    has_interval = found.low is not None
    if found.is_exact:
        return f"{found.least:.2f}" + (
            f" [{found.low:.2f}, {_bound(found.high)}]" if has_interval else ""
        )
    if found.least == 0 and found.most is None:
        return "neither in all seeds"
    if found.most is None:
        return f"> {found.least:.2f}" + (f" [> {found.low:.2f}]" if has_interval else "")
    return f"< {found.most:.2f}" + (f" [< {_bound(found.high)}]" if has_interval else "")


def _bound(value: float | None) -> str:
    return "any" if value is None else f"{value:.2f}"


def amount(value: float, unit: str) -> str:
    """12,800 rollouts, 1.24M tokens, 63 steps."""
    if unit == "tokens" and value >= 1e6:
        return f"{value / 1e6:.2f}M"
    return f"{value:,.0f}"


def three(value: float) -> str:
    return f"{value:.3f}".removeprefix("0") if value < 1 else "1.000"


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("0.", ".", 1)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

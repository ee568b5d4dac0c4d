"""The report's words: summary of each run, notes, sample completions."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from xrpo_fast.report.runs import Run

MAX_SAMPLES = 6
MAX_CHARACTERS = 1500
_NOT_LOGGED = "–"  # noqa: RUF001


def number(value: Any, digits: int = 3) -> str:
    """A logged value for the reader; an en dash where there is none."""
    if not isinstance(value, int | float):
        return _NOT_LOGGED
    return f"{value:.{digits}f}"


def summary_columns(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Heading and one cell per run, columns that no run logged left out."""
    columns = []
    for name in runs[0].eval_sets():
        prefix = f"eval/{name}/"
        columns.append(
            (f"{name} pass@1, before", [_accuracy(r, prefix + "pass@1", 0) for r in runs])
        )
        columns.append(
            (f"{name} pass@1, after", [_accuracy(r, prefix + "pass@1", -1) for r in runs])
        )
        for kind in ("pass", "cons"):
            key = _largest_k(runs, f"{prefix}{kind}@")
            if key:
                heading = f"{name} {key.removeprefix(prefix)}, after"
                columns.append((heading, [_accuracy(r, key, -1) for r in runs]))
    columns += [
        ("no-signal groups", [number(_mean(r, "groups/zero_variance_frac")) for r in runs]),
        ("hopeless prompts flipped", [_flipped(r) for r in runs]),
        (
            "tokens per answer, last step",
            [number(_last(r, "completions/mean_length"), 1) for r in runs],
        ),
        (
            "thousand tokens generated",
            [number(_total(r, "tokens/generated", 1e-3), 0) for r in runs],
        ),
        ("seconds per step", [number(_mean(r, "timing_s/step"), 2) for r in runs]),
    ]
    return [column for column in columns if any(cell != _NOT_LOGGED for cell in column[1])]


def _accuracy(run: Run, key: str, place: int) -> str:
    """Value with its interval, of the first (0) or last (-1) evaluation."""
    rows = [row for row in run.rows if isinstance(row.get(key), int | float)]
    if not rows:
        return _NOT_LOGGED
    row = rows[place]
    low, high = row.get(f"{key}/low"), row.get(f"{key}/high")
    if low is None or high is None:
        return number(row[key])
    return f"{number(row[key])} <small>{number(low)} to {number(high)}</small>"


def _largest_k(runs: Sequence[Run], prefix: str) -> str | None:
    """Key of the largest k > 1 of the last evaluations."""
    keys = {
        key
        for run in runs
        for row in run.rows
        for key in row
        if key.startswith(prefix) and key.removeprefix(prefix).isdigit()
    }
    best = max(keys, key=lambda key: int(key.removeprefix(prefix)), default=None)
    return best if best and int(best.removeprefix(prefix)) > 1 else None


def _values(run: Run, key: str) -> list[float]:
    return run.series(key)[1].tolist()


def _mean(run: Run, key: str) -> float | None:
    values = _values(run, key)
    return sum(values) / len(values) if values else None


def _last(run: Run, key: str) -> float | None:
    values = _values(run, key)
    return values[-1] if values else None


def _total(run: Run, key: str, scale: float) -> float | None:
    values = _values(run, key)
    return scale * sum(values) if values else None


def _flipped(run: Run) -> str:
    hopeless = sum(_values(run, "icl/hopeless_prompts"))
    return number(sum(_values(run, "icl/flipped_prompts")) / hopeless) if hopeless else _NOT_LOGGED


def summary_html(runs: Sequence[Run]) -> str:
    """One row per run, one column per figure; stacked on a narrow screen."""
    columns = summary_columns(runs)
    head = "".join(f"<th>{escape(heading)}</th>" for heading, _ in columns)
    body = ""
    for index, run in enumerate(runs):
        cells = "".join(
            f'<td data-label="{escape(heading)}">{cells[index]}</td>' for heading, cells in columns
        )
        body += f"<tr><th>{chip(run, index)}</th>{cells}</tr>"
    return (
        f'<table class="summary"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def chip(run: Run, index: int) -> str:
    """Name of a run in its colour."""
    return f'<span class="chip" style="--c: var(--run-{index % 8})">{escape(run.name)}</span>'


def facts_html(runs: Sequence[Run]) -> str:
    """What each run was: algorithm, model, data, steps, seed."""
    lines = ""
    for index, run in enumerate(runs):
        section = run.config
        facts = [
            ("algorithm", section.get("algorithm")),
            ("model", section.get("model", {}).get("path")),
            ("data", section.get("data", {}).get("train")),
            ("steps", run.num_steps),
            ("seed", section.get("run", {}).get("seed")),
        ]
        known = " · ".join(f"{name} {escape(str(v))}" for name, v in facts if v is not None)
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in run.notes)
        lines += f"<li>{chip(run, index)} <span>{known}</span>{notes}</li>"
    return f'<ul class="facts">{lines}</ul>'


def samples_html(runs: Sequence[Run]) -> str:
    """The same problems answered by each run last; by a single run first and last."""
    cards = ""
    for prompt_id in _shared_prompts(runs):
        answers = _answers(runs, prompt_id)
        first = answers[0][1]
        tier = f' <span class="tag">{escape(first["tier"])}</span>' if first["tier"] else ""
        columns = "".join(_answer_html(title, answer) for title, answer in answers)
        cards += (
            f'<article class="sample"><h3>{escape(prompt_id)}{tier}</h3>'
            f"<pre>{_cut(first['question'])}</pre>"
            f'<div class="answers">{columns}</div></article>'
        )
    return cards


def _shared_prompts(runs: Sequence[Run]) -> list[str]:
    """Problems with a recorded text in all runs (in a single run: at two steps), hardest first."""
    solved: dict[str, list[bool]] = defaultdict(list)
    steps: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for index, run in enumerate(runs):
        for text in run.texts:
            solved[text["prompt_id"]].append(text["solved"])
            steps[text["prompt_id"]].add((index, text["step"] if len(runs) == 1 else 0))
    needed = max(2, len(runs))
    shared = [prompt_id for prompt_id, seen in steps.items() if len(seen) >= needed]
    shared.sort(key=lambda prompt_id: (sum(solved[prompt_id]) / len(solved[prompt_id]), prompt_id))
    # Spread over the difficulty: six of the hardest alone would show failures only.
    places = np.linspace(0, len(shared) - 1, min(MAX_SAMPLES, len(shared)))
    return [shared[round(place)] for place in places]


def _answers(runs: Sequence[Run], prompt_id: str) -> list[tuple[str, dict[str, Any]]]:
    """Headings in HTML and the answers below them."""
    own = [[text for text in run.texts if text["prompt_id"] == prompt_id] for run in runs]
    if len(runs) == 1:
        return [(f"step {text['step']}", text) for text in (own[0][0], own[0][-1])]
    return [
        (f"{chip(run, index)} step {texts[-1]['step']}", texts[-1])
        for index, (run, texts) in enumerate(zip(runs, own, strict=True))
    ]


def _answer_html(title: str, answer: dict[str, Any]) -> str:
    verdict = "right" if answer["solved"] else "wrong"
    seeded = " · seeded" if answer["seeded"] else ""
    return (
        f'<div><h4>{title} <span class="tag {verdict}">{verdict}</span></h4>'
        f"<pre>{_cut(answer['response'])}</pre>"
        f"<p>{answer['num_tokens']} tokens{seeded}</p></div>"
    )


def _cut(text: str | None) -> str:
    text = text or ""
    if len(text) <= MAX_CHARACTERS:
        return escape(text)
    left_out = len(text) - MAX_CHARACTERS
    return f"{escape(text[:MAX_CHARACTERS])} … ({left_out} more characters)"

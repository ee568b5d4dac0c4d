"""Which columns of a data set mean what, and layouts whose rows need more than a column map.

A layout (code problems) adds `prompt` and `answer` to the row. The answer of a code problem is a
dictionary that rewards/code.py understands; encoded tests stay encoded until a worker needs them.
"""

import difflib
from collections.abc import Callable
from typing import Any

from xrpo_fast.sources import DataError, Record

DEFAULT_COLUMNS = {
    "prompt": ("prompt", "question", "problem", "Problem"),
    "answer": (
        "answer",
        "solution",
        "label",
        "ground_truth",
        "reward_model.ground_truth",
        "reward_spec.ground_truth",
        "reward_spec",
        "Answer",
    ),
    "id": ("id",),
    "tier": ("tier",),
}
"""Columns recognised where the column map says nothing, in order of preference."""
MISSING = object()

_MISSPELT = 0.82
"""Similarity from which a name is taken for one of ours: 'promt' is, 'idx' and 'prompt_id' not."""

_STDIN_FORMAT = (
    "Read the input from standard input and write the answer to standard output. Give the whole "
    "program in one ```python code block."
)
_STARTER_FORMAT = "Complete this code and give all of it in one ```python code block.\n\n"


def apply_layout(record: Record, columns: dict[str, str]) -> Record:
    """The row with `prompt` and `answer` in place, where it is of a known layout and the user
    mapped neither himself."""
    if "prompt" in columns or "answer" in columns:
        return record
    for required, convert in _LAYOUTS:
        if required <= record.keys():
            return {**record, **convert(record)}
    return record


def resolve_columns(record: Record, columns: dict[str, str], source: str) -> dict[str, str]:
    """Our column names -> paths in this data set, by the user's map and DEFAULT_COLUMNS.

    Raises:
        DataError: a mapped column is not there, or none for the prompt or the answer, or a name
            is a misspelt one of ours.
    """
    _check_names(columns)

    def missing_column(name: str, wanted: str) -> DataError:
        key = f"data.columns.{name}"
        return DataError(
            f"{key}: expected {wanted} in {source!r}, got the columns "
            f"{', '.join(sorted(record))}; set {key} to the right one"
        )

    resolved = {name: path for name, path in columns.items() if path}
    for name, path in resolved.items():
        if look_up(record, path) is MISSING:
            raise missing_column(name, repr(path))
    for name, candidates in DEFAULT_COLUMNS.items():
        found = [path for path in candidates if look_up(record, path) is not MISSING]
        if name not in columns and found:
            resolved[name] = found[0]
        elif name not in columns and name in ("prompt", "answer"):
            raise missing_column(name, f"one of {', '.join(candidates)}")
    if "prompt" not in resolved:
        raise missing_column("prompt", "a column")
    return resolved


def _check_names(columns: dict[str, str]) -> None:
    for name, path in columns.items():
        close = difflib.get_close_matches(name.lower(), DEFAULT_COLUMNS, 1, _MISSPELT)
        # A column that keeps its name is one that a reward function wants.
        if close and name not in DEFAULT_COLUMNS and name != path:
            raise DataError(
                f"data.columns.{name}: expected one of {', '.join(DEFAULT_COLUMNS)}, or the name "
                f"of a reward function's argument, got {name!r}; did you mean {close[0]}?"
            )


def look_up(record: Any, path: str) -> Any:
    """A field by its path, "a.b" for b in the struct a; MISSING where there is none."""
    if isinstance(record, dict) and path in record:
        return record[path]
    name, dot, rest = path.partition(".")
    if dot and isinstance(record, dict) and name in record:
        return look_up(record[name], rest)
    return MISSING


def _live_code_bench(record: Record) -> Record:
    starter = record.get("starter_code") or ""
    ask = f"{_STARTER_FORMAT}```python\n{starter}\n```" if starter.strip() else _STDIN_FORMAT
    return {
        "prompt": f"{record['question_content']}\n\n{ask}",
        "answer": {
            "layout": "livecodebench",
            "public": record["public_test_cases"],
            "private": record["private_test_cases"],
            "metadata": record.get("metadata"),
        },
    }


def _codeforces(record: Record) -> Record:
    sections = [
        ("", record["description"]),
        ("Input\n\n", record.get("input_format")),
        ("Output\n\n", record.get("output_format")),
        ("Note\n\n", record.get("note")),
    ]
    examples = record.get("examples") or []
    shown = [
        f"Example {number}\n\nInput:\n{example['input']}\nOutput:\n{example['output']}"
        for number, example in enumerate(examples, start=1)
    ]
    text = [f"{heading}{body}" for heading, body in sections if body]
    return {
        "prompt": "\n\n".join([record.get("title") or "", *text, *shown, _STDIN_FORMAT]).strip(),
        "answer": {
            "layout": "codeforces",
            "tests": record.get("official_tests") or examples,
            "time_limit": record.get("time_limit"),
            "memory_limit": record.get("memory_limit"),
            "checker": record.get("generated_checker"),
            "input_mode": record.get("input_mode"),
        },
    }


def _human_eval(record: Record) -> Record:
    return {
        "prompt": f"{_STARTER_FORMAT}```python\n{record['prompt']}\n```",
        "answer": {
            "layout": "humaneval",
            "prelude": record["prompt"],
            "test": record["test"],
            "entry_point": record["entry_point"],
        },
    }


_LAYOUTS: list[tuple[frozenset[str], Callable[[Record], Record]]] = [
    (
        frozenset({"question_content", "public_test_cases", "private_test_cases"}),
        _live_code_bench,
    ),
    (frozenset({"description", "official_tests", "time_limit"}), _codeforces),
    (frozenset({"prompt", "test", "entry_point", "canonical_solution"}), _human_eval),
]

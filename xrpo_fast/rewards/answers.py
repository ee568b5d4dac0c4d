r"""The structure of a final answer: lists, sets, intervals, units, percent signs, around atoms.

    list  := item , item ...      unordered: all answers of a question
    set   := \{ item, ... \}      unordered
    tuple := ( item, ... ]        ordered; tuples, points and intervals, brackets as written
    union := tuple \cup tuple
    atom  := [variable =] value [unit or %]

Only atoms are ever given to symbolic algebra.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from xrpo_fast.rewards.notation import (
    join_thousands,
    normalise,
    parse_number,
    split_base,
    split_percent,
    split_unit,
    without_remark,
    words_of,
)

Kind = Literal["atom", "list", "set", "tuple", "union"]

_RELATION = re.compile(r"<|>|\\(?:le|ge|lt|gt|leq|geq|ne|neq)(?![a-z])|=")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])\s*")
_VARIABLE = re.compile(
    r"((?:[A-Za-z]|\\(?!frac|sqrt|text|pm|mp|begin)[a-zA-Z]+|\\text\{[^{}]*\})"
    r"(?:_\{[^{}]*\}|_\w)?(?:\([^()=]*\))?)\s*(?:=|\\in(?![a-z]))\s*(?!=)"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer; which fields count depends on `kind`."""

    kind: Kind
    text: str
    """Normalised; equal texts are equal answers."""
    items: tuple["Answer", ...] = ()
    brackets: str = ""
    """As written, of a tuple: "()", "[]", "(]" or "[)"."""
    variable: str = ""
    value: str = ""
    """Of an atom: its text without variable, unit and percent sign."""
    number: Fraction | None = None
    num_decimals: int | None = None
    """Digits after the point, where the number is written with one."""
    unit: str = ""
    base: str = ""
    """Of a numeral written with its base, 52_8."""
    is_percent: bool = False
    is_words: bool = False

    @property
    def is_relation(self) -> bool:
        return self.kind == "atom" and bool(_RELATION.search(self.value))


@lru_cache(maxsize=4096)
def parse_answer(text: str, *, strip_thousands: bool = True) -> Answer:
    """Structure of an answer in LaTeX or plain text; never raises.

    Args:
        strip_thousands: 8,000 and 8 000 are numbers, not lists; a comma before a space, or inside
            brackets, always separates.
    """
    return _parse(normalise(text), strip_thousands, depth=0)


def _parse(text: str, strip_thousands: bool, depth: int) -> Answer:
    if depth == 0:
        text = without_remark(text)
        if strip_thousands:
            text = join_thousands(text)
    if depth > 4:
        return Answer("atom", text, value=text)
    match = _VARIABLE.match(text)
    variable, body = (match[1].replace(" ", ""), text[match.end() :]) if match else ("", text)
    parts = _split(body, ",")
    if len(parts) > 1 and all(parts):
        items = [_parse(part, strip_thousands, depth + 1) for part in parts]
        items[0] = replace(items[0], variable=items[0].variable or variable)
        return Answer("list", text, items=_flat(items))
    pieces = _split(body, r"\cup")
    if len(pieces) > 1 and all(pieces):
        items = [_parse(piece, strip_thousands, depth + 1) for piece in pieces]
        return Answer("union", text, items=tuple(items))
    bracketed = _bracketed(body, strip_thousands, depth)
    if bracketed is not None:
        return replace(bracketed, text=text, variable=variable)
    if _PLUS_MINUS.search(body):
        both = [_parse(_with_sign(body, sign), strip_thousands, depth + 1) for sign in "+-"]
        return Answer("list", text, items=tuple(both))
    return _atom(text, variable, body)


def _with_sign(text: str, sign: str) -> str:
    """One of the two readings of an expression with \\pm and \\mp."""
    other = "-" if sign == "+" else "+"
    signed = _PLUS_MINUS.sub(lambda m: sign if m[0].startswith(r"\pm") else other, text)
    return signed.removeprefix("+").strip()


def _flat(items: list[Answer]) -> tuple[Answer, ...]:
    """The two readings of a plus-minus stand beside the other answers."""
    return tuple(
        inner for item in items for inner in (item.items if item.kind == "list" else (item,))
    )


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators outside all brackets."""
    parts, level, start, i = [], 0, 0, 0
    while i < len(text):
        if text.startswith(separator, i) and level == 0:
            parts.append(text[start:i].strip())
            i += len(separator)
            start = i
            continue
        level += (text[i] in "([{") - (text[i] in ")]}")
        i += 2 if text[i] == "\\" and text[i + 1 : i + 2] not in ("{", "}") else 1
    return [*parts, text[start:].strip()]


def _bracketed(text: str, strip_thousands: bool, depth: int) -> Answer | None:
    """A set, or a tuple of at least two items; None for anything else."""
    is_set = text.startswith(r"\{") and text.endswith(r"\}")
    inner = text[2:-2] if is_set else text[1:-1]
    is_tuple = len(text) > 2 and text[0] in "([" and text[-1] in ")]"
    if not (is_set or is_tuple) or not _is_balanced(inner):
        return None
    parts = _split(inner, ",")
    if not all(parts) or (is_tuple and len(parts) < 2):
        return None
    items = [_parse(part, strip_thousands, depth + 1) for part in parts]
    if is_set:
        return Answer("set", text, items=_flat(items))
    return Answer("tuple", text, items=tuple(items), brackets=text[0] + text[-1])


def _is_balanced(text: str) -> bool:
    level = 0
    for character in text:
        level += (character in "([{") - (character in ")]}")
        if level < 0:
            return False
    return level == 0


def _atom(text: str, variable: str, body: str) -> Answer:
    body, is_percent = split_percent(body)
    body, unit = split_unit(body)
    body, base = split_base(body)
    number, num_decimals = parse_number(body)
    words = words_of(body) if number is None else None
    return Answer(
        "atom",
        text,
        variable=variable,
        value=body if words is None else words,
        number=number,
        num_decimals=num_decimals,
        unit=unit,
        base=base,
        is_percent=is_percent,
        is_words=words is not None,
    )

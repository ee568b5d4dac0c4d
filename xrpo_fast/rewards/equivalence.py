"""Whether two parsed answers are the same, under an explicit policy."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from xrpo_fast.rewards import symbolic
from xrpo_fast.rewards.answers import Answer


@dataclass(kw_only=True, frozen=True, slots=True)
class MathPolicy:
    """What counts as the same answer."""

    answer_format: Literal["boxed", "hash", "stated", "any"] = "boxed"
    r"""boxed: the last complete \boxed{}; hash: after ####; stated: after "answer is", else the
    last line; any: the first of these that is there."""
    percent: Literal["optional", "value"] = "optional"
    """optional: 50% = 50 = 1/2; value: 50% = 1/2 only."""
    units: Literal["optional", "ignore"] = "optional"
    """optional: a unit may be left out, but two units must agree; ignore: units say nothing."""
    decimal_places: int | None = 6
    """A decimal with at least so many places equals what rounds to it; None: exact only."""
    strip_thousands: bool = True
    """8,000 is a number; otherwise a list of two."""


def are_equal_answers(a: Answer, b: Answer, policy: MathPolicy) -> bool:
    """Whether two parsed answers are the same; symmetric.

    Raises:
        TooComplexError: the comparison would take unbounded time or memory.
    """
    if a.text == b.text:
        return True
    if a.variable and b.variable and a.variable != b.variable:
        return False
    if a.kind == b.kind == "atom":
        return _equal_atoms(a, b, policy)
    if a.is_relation or b.is_relation:
        # An interval or a union against an inequality.
        return symbolic.are_equal(a.text, b.text)
    if "atom" in (a.kind, b.kind):
        several, single = (b, a) if a.kind == "atom" else (a, b)
        is_singleton = several.kind == "set" and len(several.items) == 1
        return is_singleton and are_equal_answers(several.items[0], single, policy)
    if len(a.items) != len(b.items):
        return False
    kinds = {a.kind, b.kind}
    if kinds == {"tuple"}:
        return a.brackets == b.brackets and _equal_in_order(a.items, b.items, policy)
    if kinds == {"tuple", "list"}:
        # A pair whose parentheses were left out.
        brackets = a.brackets or b.brackets
        return brackets == "()" and _equal_in_order(a.items, b.items, policy)
    if "tuple" in kinds or ("union" in kinds and len(kinds) > 1):
        return False
    if _names_only_one_side(a, b):
        return _equal_in_order(a.items, b.items, policy)
    return _equal_in_any_order(a.items, b.items, policy)


def _names_only_one_side(a: Answer, b: Answer) -> bool:
    """Whether one list names several variables and the other none: then order is meaning."""
    names = [len({item.variable for item in side.items} - {""}) for side in (a, b)]
    return min(names) == 0 and max(names) > 1


def _equal_in_order(first: Iterable[Answer], second: Iterable[Answer], policy: MathPolicy) -> bool:
    return all(are_equal_answers(a, b, policy) for a, b in zip(first, second, strict=True))


def _equal_in_any_order(
    first: Iterable[Answer], second: Iterable[Answer], policy: MathPolicy
) -> bool:
    unmatched = list(second)
    for a in first:
        match = next((i for i, b in enumerate(unmatched) if are_equal_answers(a, b, policy)), None)
        if match is None:
            return False
        del unmatched[match]
    return True


def _equal_atoms(a: Answer, b: Answer, policy: MathPolicy) -> bool:
    if policy.units == "optional" and a.unit and b.unit and a.unit != b.unit:
        return False
    if a.base and b.base and a.base != b.base:
        return False
    if a.is_percent != b.is_percent:
        percent, plain = (a, b) if a.is_percent else (b, a)
        return _equal_percent(percent, plain, policy)
    if a.number is not None and b.number is not None:
        return _equal_numbers(a, b, policy)
    if a.is_words and b.is_words:
        return a.value == b.value or _equal_spellings(a.value, b.value)
    a_value, b_value = _result(a, b), _result(b, a)
    if a_value == b_value:
        return True
    if a.num_decimals is not None or b.num_decimals is not None:
        return _equal_rounded(a, b, policy)
    return symbolic.are_equal(a_value, b_value)


def _equal_spellings(first: str, second: str) -> bool:
    """Short letter groups may also be products: xy = yx."""
    is_product = len(first) <= 3 and len(second) <= 3 and " " not in first + second
    return is_product and len(first) > 1 and sorted(first) == sorted(second)


def _result(atom: Answer, other: Answer) -> str:
    """The value, or what a chain of equations of numbers ends in: 5 + 3 = 8 is 8."""
    if "=" not in atom.value or "=" in other.value or atom.is_words:
        return atom.value
    left, _, right = atom.value.rpartition("=")
    has_relation = any(sign in atom.value for sign in ("<", ">", r"\le", r"\ge", r"\ne"))
    is_numeric = not any(c.isalpha() for c in left.replace(r"\frac", "").replace(r"\times", ""))
    return right.strip() if is_numeric and not has_relation else atom.value


def _equal_numbers(a: Answer, b: Answer, policy: MathPolicy) -> bool:
    assert a.number is not None
    assert b.number is not None
    if a.number == b.number:
        return True
    return _rounds_to(b.number, a, policy) or _rounds_to(a.number, b, policy)


def _rounds_to(value: Fraction, decimal: Answer, policy: MathPolicy) -> bool:
    """Whether an exact value, or a longer decimal, rounds to a decimal as it is written."""
    places = decimal.num_decimals
    if policy.decimal_places is None or places is None or places < policy.decimal_places:
        return False
    assert decimal.number is not None
    return abs(value - decimal.number) <= Fraction(1, 2 * 10**places)


def _equal_rounded(a: Answer, b: Answer, policy: MathPolicy) -> bool:
    """A decimal against an irrational number, pi or a root."""
    decimal, other = (a, b) if a.num_decimals is not None else (b, a)
    if other.is_words:
        return False
    value = symbolic.numeric_value(_result(other, decimal))
    if value is None:
        return False
    exact = Fraction(str(value))
    return exact == decimal.number or _rounds_to(exact, decimal, policy)


def _equal_percent(percent: Answer, plain: Answer, policy: MathPolicy) -> bool:
    if percent.number is None:
        return policy.percent == "optional" and symbolic.are_equal(percent.value, plain.value)
    if plain.number is None:
        return False
    if plain.number * 100 == percent.number:
        return True
    return policy.percent == "optional" and _equal_numbers(percent, plain, policy)

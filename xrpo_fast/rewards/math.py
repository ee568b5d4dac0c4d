r"""Math answers: strict extraction, then equivalence under an explicit policy.

    completion -> visible text -> final answer -> structure (answers.py) -> atoms (symbolic.py)

Nothing inside an unfinished thought counts, nor an unterminated box, nor a mention in passing where
a box is demanded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from xrpo_fast.rewards import symbolic
from xrpo_fast.rewards.answers import Answer, parse_answer
from xrpo_fast.rewards.equivalence import MathPolicy, are_equal_answers
from xrpo_fast.rewards.extract import hash_answer, last_box, stated_answer, visible_text
from xrpo_fast.rewards.symbolic import TooComplexError

MAX_ANSWER_CHARS = 1000
"""Longer final answers are wrong without a look."""

Reason = Literal["equal", "different", "no_answer", "unfinished_thought", "too_long", "too_complex"]


class GoldError(ValueError):
    """A gold answer cannot be parsed; found when data is loaded."""


@dataclass(kw_only=True, frozen=True, slots=True)
class MathVerdict:
    """Whether a completion is right, its final answer, and why."""

    correct: bool
    extracted: str | None
    """Canonical: a number as p/q, anything else as normalised LaTeX."""
    reason: Reason


def verify_math(
    completion: str, answer: object, *, policy: MathPolicy | None = None
) -> MathVerdict:
    """Whether the final answer of a completion equals the gold answer.

    Never raises on model text; what cannot be parsed is not equal.

    Args:
        completion: decoded response, with the `<think>` that its prompt may end in.
        answer: gold; text in LaTeX (with or without a box or ####), int, float, or what
            parse_gold returned.
    Raises:
        TypeError: completion is not text.
        GoldError: the gold answer cannot be parsed.
    """
    policy = policy or MathPolicy()
    if not isinstance(completion, str):
        raise TypeError(f"completion: expected str, got {type(completion).__name__}")
    gold = answer if isinstance(answer, Answer) else parse_gold(answer, policy=policy)
    visible = visible_text(completion)
    if visible is None:
        return MathVerdict(correct=False, extracted=None, reason="unfinished_thought")
    final = extract_answer(visible, policy)
    if not final:
        return MathVerdict(correct=False, extracted=None, reason="no_answer")
    if len(final) > MAX_ANSWER_CHARS:
        return MathVerdict(correct=False, extracted=None, reason="too_long")
    parsed = parse_answer(final, strip_thousands=policy.strip_thousands)
    canonical = _canonical(parsed)
    try:
        is_equal = are_equal_answers(gold, parsed, policy)
    except (TooComplexError, MemoryError, RecursionError):
        return MathVerdict(correct=False, extracted=canonical, reason="too_complex")
    return MathVerdict(
        correct=is_equal, extracted=canonical, reason="equal" if is_equal else "different"
    )


def parse_gold(answer: object, *, policy: MathPolicy | None = None) -> Answer:
    r"""A gold answer, parsed; call it when data is loaded.

    Takes the last \boxed{} or #### of a worked solution, else the whole text.

    Raises:
        GoldError: empty, not text or a number, or not an answer in any reading.
    """
    policy = policy or MathPolicy()
    text = _gold_text(answer)
    if len(text) <= MAX_ANSWER_CHARS:
        parsed = parse_answer(text, strip_thousands=policy.strip_thousands)
        if all(_is_readable(atom) for atom in _atoms(parsed)):
            return parsed
    raise GoldError(
        f"answer: expected a number, an expression in LaTeX or words, got {text[:200]!r}"
    )


def equivalent(first: str, second: str, *, policy: MathPolicy | None = None) -> bool:
    """Whether two extracted answers are the same, in both directions; False where unparsable."""
    policy = policy or MathPolicy()
    if max(len(first), len(second)) > MAX_ANSWER_CHARS:
        return first == second
    a, b = (parse_answer(t, strip_thousands=policy.strip_thousands) for t in (first, second))
    try:
        return are_equal_answers(a, b, policy)
    except (TooComplexError, MemoryError, RecursionError):
        return False


def warm_up() -> None:
    """Fill the parser's and sympy's caches, seconds of work, so that forked workers share them."""
    samples = [
        (r"\frac{\sqrt{3}}{2} + x_1^2", r"x_1^2 + \sqrt{3}/2"),
        (r"[1,2) \cup (3, \infty)", r"(3, \infty) \cup [1,2)"),
        (r"x < 3", r"(-\infty, 3)"),
        (r"\begin{pmatrix} 1 \\ \pi \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3.14 \end{pmatrix}"),
        (r"\log_2 8 + \sin(x) - |y| + \binom{5}{2}", r"e^{i\pi} + 5!"),
    ]
    for first, second in samples:
        equivalent(first, second)


def extract_answer(visible: str, policy: MathPolicy) -> str | None:
    """The final answer as written, by the policy's format; None if there is none."""
    if policy.answer_format == "boxed":
        return last_box(visible)
    if policy.answer_format == "hash":
        return hash_answer(visible)
    if policy.answer_format == "any":
        for extract in (last_box, hash_answer):
            if (answer := extract(visible)) is not None:
                return answer
    stated = stated_answer(visible)
    box = None if stated is None else last_box(stated)
    return stated if box is None else box


def _gold_text(answer: object) -> str:
    if isinstance(answer, list | tuple) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise GoldError(f"answer: expected text or a number, got {type(answer).__name__}")
    if isinstance(answer, float):
        if answer != answer or abs(answer) == float("inf"):
            raise GoldError(f"answer: expected a finite number, got {answer}")
        return format(Decimal(repr(answer)), "f")
    text = str(answer).strip()
    box = last_box(text)
    text = box if box is not None else hash_answer(text) or text
    if not text:
        raise GoldError("answer: expected text, got an empty one")
    return text


def _atoms(answer: Answer) -> Iterable[Answer]:
    if answer.kind == "atom":
        yield answer
    for item in answer.items:
        yield from _atoms(item)


def _is_readable(atom: Answer) -> bool:
    if atom.number is not None or atom.is_words:
        return True
    try:
        return symbolic.parse_expression(atom.value) is not None
    except TooComplexError:
        # Equal texts are equal; nothing else will match.
        return True


def _canonical(answer: Answer) -> str:
    if answer.kind == "atom" and answer.number is not None and not answer.variable:
        value = answer.number / 100 if answer.is_percent else answer.number
        return str(value)
    return answer.text

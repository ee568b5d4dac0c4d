"""Equality of two mathematical expressions, by math-verify on sympy.

Its own SIGALRM timeouts are off: they fail outside the main thread and do not stop C code. The
worker pool bounds the time; what is sure to be too large is refused before it is evaluated.
"""

import logging
import math
from functools import lru_cache
from typing import Any

MAX_EXPRESSION_CHARS = 500
MAX_LOG10 = 20_000.0
"""Integers of more digits are not computed."""
PROBE_DIGITS = 30


class TooComplexError(ValueError):
    """The expression would take unbounded time or memory."""


@lru_cache(maxsize=1)
def _engine() -> tuple[Any, Any, list[Any]]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # It warns once that nobody bounds its time; the worker pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its unit removal takes a trailing variable for a unit (2c -> 2), its box handling joins boxes.
    normalisation = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    config = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalisation)
    return parse, verify, [config]


@lru_cache(maxsize=2048)
def parse_expression(latex: str) -> Any:
    """The sympy object of a LaTeX expression, unevaluated; None where it cannot be parsed.

    Raises:
        TooComplexError: too long, or it holds numbers too large to compute.
    """
    if len(latex) > MAX_EXPRESSION_CHARS:
        raise TooComplexError(f"expression of {len(latex)} characters")
    if not latex.strip() or "$" in latex:
        return None
    parse, _, config = _engine()
    parsed = parse(f"${latex}$", config, fallback_mode="no_fallback", parsing_timeout=None)
    if not parsed:
        return None
    if _log10_bound(parsed[0]) > MAX_LOG10:
        raise TooComplexError("expression with too large numbers")
    return _with_imaginary_unit(parsed[0])


def are_equal(first: str, second: str) -> bool:
    """Whether two LaTeX expressions are equal, asked in both directions; False where one cannot
    be parsed.

    Raises:
        TooComplexError: see parse_expression.
    """
    a, b = parse_expression(first), parse_expression(second)
    if a is None or b is None:
        return False
    if _differ_numerically(a, b):
        return False
    _, verify, _ = _engine()
    options = {"timeout_seconds": None, "allow_set_relation_comp": True}
    return bool(verify(a, b, **options)) and bool(verify(b, a, **options))


def numeric_value(latex: str) -> Any:
    """30-digit real value of a constant expression; None for anything else."""
    expression = parse_expression(latex)
    try:
        if expression is None or expression.free_symbols:
            return None
        value = expression.doit().evalf(PROBE_DIGITS)
        return value if value.is_Float or value.is_Integer or value.is_Rational else None
    except (AttributeError, ArithmeticError, TypeError, ValueError):
        return None


def _with_imaginary_unit(expression: Any) -> Any:
    """A free symbol i is the imaginary unit; an index of summation is not free."""
    import sympy

    if not isinstance(expression, sympy.Expr):
        return expression
    units = {symbol: sympy.I for symbol in expression.free_symbols if str(symbol) == "i"}
    return expression.subs(list(units.items())) if units else expression


def _differ_numerically(a: Any, b: Any) -> bool:
    """True where one evaluation proves that two expressions differ: cheap, and most wrong answers
    never reach the simplifier."""
    import sympy

    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {s: sympy.Rational(17 + 6 * i, 13 + 4 * i) for i, s in enumerate(symbols)}
    try:
        values = [sympy.N(e.doit().subs(list(point.items())), PROBE_DIGITS) for e in (a, b)]
        if not all(value.is_number and value.is_finite for value in values):
            return False
        gap = abs(values[0] - values[1])
        return bool(gap > 1e-6 * (1 + abs(values[0])))
    # What cannot be evaluated at a point is left to the full comparison.
    except Exception:
        return False


def _log10_bound(expression: Any) -> float:
    """Upper bound of log10 |value| of the largest number inside, without computing it."""
    import sympy

    if isinstance(expression, sympy.Integer):
        return len(str(expression)) if expression < 10**4000 else math.inf
    if not isinstance(expression, sympy.Basic):
        return 0.0
    bounds = [_log10_bound(argument) for argument in expression.args]
    largest = max(bounds, default=1.0)
    if isinstance(expression, sympy.Pow):
        exponent = 10 ** min(bounds[1], 300.0)
        is_symbolic = bool(expression.exp.free_symbols)
        return largest if is_symbolic else max(bounds[1], max(bounds[0], 1.0) * exponent)
    if isinstance(expression, sympy.factorial | sympy.factorial2 | sympy.gamma | sympy.binomial):
        return max(largest, 10 ** min(largest, 300.0) * largest)
    if isinstance(expression, sympy.Add | sympy.Mul):
        return max(largest, sum(bounds))
    return largest

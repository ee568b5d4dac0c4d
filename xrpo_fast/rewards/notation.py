"""How answers are written: LaTeX and plain spellings of numbers, units, percent signs, words."""

import re
from fractions import Fraction

MAX_DIGITS = 1000
"""Longer numerals are not read as numbers."""
MAX_WORDS_CHARS = 100
"""Longer prose is no answer."""

_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u222a": r"\cup ",
        "\u00b0": r"^\circ ",
        "\u00b1": r"\pm ",
        "\u00a0": " ",
        "\uff0c": ",",
    }
)
_REWRITES = [
    (re.compile(r"\\(?:displaystyle|left|right|[bB]igg?[lr]?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (
        re.compile(
            r"\\(?:mathrm|textbf|textit|textrm|textsf|mathbf|mathit|mbox|operatorname|"
            r"textnormal)(?![a-zA-Z])"
        ),
        r"\\text",
    ),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!,\\!|,\\!)(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\[!]"), ""),
    (re.compile(r"(?<!\\)\\[,;:> ]|(?<!\\)~|\\q?quad(?![a-zA-Z])"), " "),
    (re.compile(r"\\[$]"), ""),
    (re.compile(r"\s*(?:,?\s*\\text\{\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+)\s*"), ","),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\(?:geqslant|geq)(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\(?:leqslant|leq)(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\(?:thinspace|mathstrut|strut)(?![a-zA-Z])"), ""),
    (re.compile(r"\s+"), " "),
]
_COMMA_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACE_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|percent)$")
_TEXT_UNIT = re.compile(
    r"^(.*[\d)}a-z])\s*\\text\{\s*([^{}\d]*[^{}\d\s])\s*\}\s*(?:\^\{?(\d)\}?)?$"
)
_DEGREE_UNIT = re.compile(
    r"^(.*\d\}?)\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*([CFK])\s*\}|([CF]))?$"
)
_PROSE_UNIT = re.compile(
    r"^([-+]?\d[\d,]*(?:\.\d+)?)\s+(?!(?:pi|sqrt|sin|cos|tan|log|ln|exp|mod)\b)"
    r"([A-Za-z]{2,})((?:[\s,.'-]+[A-Za-z]+)*)(?:\s*\^\{?(\d)\}?)?[.!]?$"
)
_UNIT_ALIASES = {
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "meter": "m", "metre": "m",
    "kilometer": "km", "gram": "g", "kilogram": "kg", "second": "s", "sec": "s", "minute": "min",
    "hour": "h", "hr": "h", "inche": "inch", "in": "inch", "foot": "ft", "feet": "ft",
    "dollar": "", "unit": "", "degree": "degree", "deg": "degree",
}  # fmt: skip
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"([-+]?)\s*({_DECIMAL})")
_FRACTION = re.compile(
    r"([-+]?)\s*(\d*)\s*\\frac\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))"
)
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\s*\{\s*(\d+)\s*\}")
_SLASH = re.compile(r"([-+]?)\s*(\d+)\s*/\s*(\d+)")
_SCIENTIFIC = re.compile(
    rf"([-+]?)\s*({_DECIMAL})\s*\\(?:times|cdot)\s*10\s*\^\s*\{{?\s*([-+]?\d{{1,3}})\s*\}}?"
)
_BASE = re.compile(r"((?=[A-Z]*\d)[\dA-Z]*\d)_(?:\{\s*(\d+)\s*\}|(\d+))")
_WORDS = re.compile(r"[^\W\d_][^\W\d_]+(?:[\s\-'.,/]+[^\W\d_]+)*[.!]?")
_CHOICE = re.compile(r"\(?\s*([A-J])\s*\)?\.?")


def normalise(text: str) -> str:
    """One spelling of LaTeX that means the same: brackets, fractions, spaces, fonts, wrappers."""
    text = text.translate(_UNICODE).strip()
    for opening, closing in _WRAPPERS:
        is_wrapped = text.startswith(opening) and text.endswith(closing)
        if is_wrapped and len(text) > len(opening + closing):
            text = text[len(opening) : -len(closing)].strip()
    text = text.replace("$", "") if r"\$" not in text else text
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".,;").strip()


def join_thousands(text: str) -> str:
    """8,000 and 8 000 become 8000 where no bracket is open."""
    levels, level = [], 0
    for character in text:
        level += (character in "([{") - (character in ")]}")
        levels.append(level)

    def join(match: re.Match[str]) -> str:
        is_outside = levels[match.start()] <= 0
        return re.sub("[, ]", "", match[0]) if is_outside else match[0]

    joined = _COMMA_GROUPS.sub(join, text)
    return joined if joined != text else _SPACE_GROUPS.sub(join, text)


def without_remark(text: str) -> str:
    """72 clips, altogether. -> 72 clips"""
    prose = _PROSE_UNIT.match(text)
    return text[: prose.end(2)] if prose else text


def split_percent(text: str) -> tuple[str, bool]:
    """What stands before a percent sign, and whether there is one."""
    sign = _PERCENT.search(text)
    return (text[: sign.start()], True) if sign and sign.start() > 0 else (text, False)


def split_base(text: str) -> tuple[str, str]:
    """Numeral and base of 52_8; the base is empty where there is none."""
    match = _BASE.fullmatch(text)
    return (match[1], match[2] or match[3]) if match else (text, "")


def split_unit(body: str) -> tuple[str, str]:
    """What stands before a unit, and the unit's name; empty where there is none."""
    degree = _DEGREE_UNIT.match(body)
    if degree:
        return degree[1].strip(), "degree" + (degree[2] or degree[3] or "").lower()
    match = _TEXT_UNIT.match(body)
    if match:
        return match[1].strip(), _unit_name(match[2], match[3])
    match = _PROSE_UNIT.match(body)
    if match:
        return match[1], _unit_name(match[2], match[4])
    return body, ""


def _unit_name(name: str, power: str | None) -> str:
    name = name.strip().lower().replace(".", "")
    if prefixed := re.fullmatch(r"(square|sq|cubic|cu)\s+(.+)", name):
        name, power = prefixed[2], "2" if prefixed[1].startswith("s") else "3"
    singular = name.removesuffix("s") if len(name) > 2 else name
    name = _UNIT_ALIASES.get(name, _UNIT_ALIASES.get(singular, singular))
    return f"{name}^{power}" if power and name else name


def parse_number(text: str) -> tuple[Fraction | None, int | None]:
    """(value, digits after the point or None) of an integer, decimal, repeating decimal, fraction,
    mixed number or a x 10^b; (None, None) for anything else."""
    text = text.strip()
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    if len(text) > MAX_DIGITS:
        return None, None
    if match := _NUMBER.fullmatch(text):
        value = Fraction(match[1] + match[2].rstrip(".")) if match[2] != "." else None
        _, point, decimals = match[2].partition(".")
        return value, len(decimals) if point and decimals else None
    if match := _REPEATING.fullmatch(text):
        scale = 10 ** len(match[3])
        head = Fraction(int(match[2] + match[3] or 0), scale)
        tail = Fraction(int(match[4]), scale * (10 ** len(match[4]) - 1))
        return (-1 if match[1] == "-" else 1) * (head + tail), None
    if match := _FRACTION.fullmatch(text):
        sign, whole, denominator = match[1], match[2], int(match[5] or match[6])
        if denominator:
            part = Fraction(int(match[3] or match[4]), denominator)
            return (-1 if sign == "-" else 1) * (int(whole or 0) + part), None
    if (match := _SLASH.fullmatch(text)) and int(match[3]):
        return Fraction(int(match[1] + match[2]), int(match[3])), None
    if match := _SCIENTIFIC.fullmatch(text):
        return Fraction(match[1] + match[2]) * Fraction(10) ** int(match[3]), None
    return None, None


def words_of(body: str) -> str | None:
    r"""Words of a textual answer, without \text{}, in lower case; a choice letter as it is."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", body).strip()
    if choice := _CHOICE.fullmatch(plain):
        return choice[1]
    if len(plain) > MAX_WORDS_CHARS:
        return None
    is_marked = plain != body.strip() and not re.search(r"[\\_^{}=<>]", plain) and bool(plain)
    if is_marked or _WORDS.fullmatch(plain):
        return " ".join(plain.rstrip(".!").lower().split())
    return None

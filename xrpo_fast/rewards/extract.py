r"""Where the final answer stands in a model's text. Linear in the length of the text, never raises.

Nothing inside a thought counts: with `<think>` open and no `</think>`, there is no visible text.
"""

import re

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_HASH_LINE = re.compile(r"^[ \t]*####[ \t]*(\S[^\n]*)$", re.MULTILINE)
_STATED = re.compile(r"(?i:\banswer)\s*(?:(?i:is)\s*:?|:)\s*([^\n]+)")


def visible_text(text: str) -> str | None:
    """The part after the last closed thought; None where the thought never ended.

    Where the prompt already ends in `<think>`, the text must be given with that tag.
    """
    head, close, tail = text.rpartition(_THINK_CLOSE)
    if not close and text.lstrip().startswith(_THINK_OPEN):
        return None
    visible = tail if close else head + tail
    return visible.partition(_THINK_OPEN)[0]


def last_box(text: str) -> str | None:
    r"""Content of the last complete `\boxed{}` or `\fbox{}`; None if there is none.

    A box closed later, or around another, replaces it, unless it holds that box and nothing else.
    """
    open_braces: list[tuple[int, int] | None] = []
    answer = box = None
    for match in _BOX.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None:
                is_wrapper = (
                    box is not None
                    and box[0] >= opened[1]
                    and not text[opened[1] : box[0]].strip()
                    and not text[box[1] : match.start()].strip()
                )
                answer = answer if is_wrapper else (opened[1], match.start())
                box = (opened[0], match.end())
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(match.span())
    return None if answer is None else text[slice(*answer)].strip()


def hash_answer(text: str) -> str | None:
    """What follows `####` on the last such line, as GSM8K writes answers."""
    lines = _HASH_LINE.findall(text)
    return lines[-1].strip() if lines else None


def stated_answer(text: str) -> str | None:
    """What follows the last "answer is" or "answer:", else the last line that is not empty."""
    stated = _STATED.findall(text)
    if stated:
        return stated[-1].strip()
    lines = text.strip().rsplit("\n", 1)
    return lines[-1].strip() or None

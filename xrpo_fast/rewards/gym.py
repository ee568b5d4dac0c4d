"""Scores of reasoning-gym tasks, by each data set's own scorer (extra `reasoning-gym`)."""

import re
from functools import cache
from typing import Any

from xrpo_fast.rewards.extract import last_box, visible_text
from xrpo_fast.rewards.functions import Item, Score

_ANSWER_TAG = re.compile(r"<answer>([^<]*)</answer>")


class ReasoningGymScorer:
    """Graded reward in [0, 1] of the answer in the last box, else in <answer>, else of the text.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self) -> None:
        try:
            import reasoning_gym  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                "functions: expected the package 'reasoning-gym' for reasoning_gym, found none; "
                "pip install 'xrpo-fast[reasoning-gym]'"
            ) from error
        self._scorer_of: Any = cache(reasoning_gym.get_score_answer_fn)

    def __call__(self, item: Item) -> Score:
        name = item["columns"].get("reasoning_gym")
        if name is None:
            return Score(None)
        answer = extract_answer(item["text"])
        entry: dict[str, Any] = {
            "question": item["question"],
            "answer": item["answer"],
            "metadata": item["columns"]["metadata"],
        }
        score = 0.0 if answer is None else float(self._scorer_of(name)(answer, entry))
        return Score(min(max(score, 0.0), 1.0), answer)


def extract_answer(text: str) -> str | None:
    """The answer after the thought; None where the thought never ends."""
    visible = visible_text(text)
    if visible is None:
        return None
    box = last_box(visible)
    tags = _ANSWER_TAG.findall(visible) if box is None else []
    return (tags[-1] if tags else visible if box is None else box).strip()

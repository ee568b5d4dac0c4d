"""Keeps evaluation problems out of the corpus and out of every prompt.

A training problem is blocked, and the first reason that holds is counted, where

    id          it has the id of an evaluation problem
    text        its normalised text is that of an evaluation problem
    13-gram     it shares 13 words in a row with one (natural language only)
    cosine      its cosine to one exceeds 0.9 (natural language only)

Prompts of generated tasks differ in digits alone, so only id and text count there. Thirteen words
that stand in many problems ("Solve the following ... Put your answer ...") are an instruction and
no evidence, nor are runs that begin or end in it.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Literal

import numpy as np

from xrpo_fast.exemplars.embed import words
from xrpo_fast.types import Prompt

Kind = Literal["natural", "generated"]

GRAM_WORDS = 13
MAX_SIMILARITY = 0.9
# A leaked problem stands in the training set a few times; an instruction stands in all of it.
_MAX_GRAM_PROBLEMS = 10
_MAX_GRAM_FRAC = 0.01
_MIN_EVAL_FOR_INSTRUCTION = 4

_IGNORED = str.maketrans("", "", "$\\.,;:!?'\"`\u2018\u2019\u201c\u201d")


def normalise(text: str, kind: Kind) -> str:
    """Text under which two statements are one problem.

    Natural language: Unicode compatibility form, case, white space, quotes and sentence marks do
    not count; operators do. Generated: only white space at the ends does not count.
    """
    if kind == "generated":
        return text.strip()
    plain = unicodedata.normalize("NFKC", text).casefold().translate(_IGNORED)
    return "".join(plain.split())


def problem_groups(prompts: Sequence[Prompt], kind: Kind, known: dict[str, int]) -> np.ndarray:
    """(P,) int64, equal for equal normalised texts; `known` maps text hashes and is extended."""
    groups = np.empty(len(prompts), np.int64)
    for row, prompt in enumerate(prompts):
        digest = hashlib.sha256(normalise(prompt.question, kind).encode("utf-8", "replace"))
        groups[row] = known.setdefault(digest.hexdigest(), len(known))
    return groups


def grams(text: str, instruction: Set[str] = frozenset()) -> set[str]:
    """All runs of 13 words of a text, but for those that touch an instruction's runs."""
    tokens = words(text)
    runs = [" ".join(tokens[i : i + GRAM_WORDS]) for i in range(len(tokens) - GRAM_WORDS + 1)]
    if instruction.isdisjoint(runs):
        return set(runs)
    is_instruction = np.zeros(len(tokens), bool)
    for i, run in enumerate(runs):
        if run in instruction:
            is_instruction[i : i + GRAM_WORDS] = True
    return {run for i, run in enumerate(runs) if not is_instruction[i : i + GRAM_WORDS].any()}


class LeakageGuard:
    """The block list of one training set against all evaluation sets.

    Args:
        groups, eval_groups: (P,) and (E,) int64 from problem_groups with one `known`.
        similarities: (P,) float32, largest cosine of each training prompt to an evaluation prompt;
            reported for every kind, a reason to block only for natural language.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        kind: Kind,
        groups: np.ndarray,
        eval_groups: np.ndarray,
        similarities: np.ndarray,
    ) -> None:
        self.num_eval_prompts = len(eval_prompts)
        self.largest_similarity = float(similarities.max(initial=0.0))
        self._grams: set[str] = set()
        self.num_instruction_grams = 0
        self.reasons: dict[int, str] = {}
        """Reason for each blocked training prompt, by its index."""
        eval_ids = {prompt.id for prompt in eval_prompts}
        eval_texts = set(eval_groups.tolist())
        shares_gram = [False] * len(prompts)
        if kind == "natural":
            shares_gram = self._share_grams(prompts, eval_prompts, groups)
        for row, prompt in enumerate(prompts):
            if prompt.id in eval_ids:
                self.reasons[row] = "id"
            elif int(groups[row]) in eval_texts:
                self.reasons[row] = "text"
            elif shares_gram[row]:
                self.reasons[row] = "13-gram"
            elif kind == "natural" and similarities[row] > MAX_SIMILARITY:
                self.reasons[row] = "cosine"

    def is_blocked(self, prompt_index: int) -> bool:
        """Whether a training problem must never be shown."""
        return prompt_index in self.reasons

    def quotes_evaluation(self, response: str) -> bool:
        """Whether a response shares 13 words in a row with an evaluation problem."""
        return bool(self._grams) and not self._grams.isdisjoint(grams(response))

    def counts(self) -> dict[str, int]:
        """Blocked training prompts by reason."""
        return dict(Counter(self.reasons.values()))

    def _share_grams(
        self, prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt], groups: np.ndarray
    ) -> list[bool]:
        """Finds the evaluation's telling runs; says of each training prompt if it shares one."""
        in_eval = _count_grams(grams(prompt.question) for prompt in eval_prompts)
        shared = [grams(prompt.question) & in_eval.keys() for prompt in prompts]
        _, first_rows = np.unique(groups, return_index=True)
        in_train = _count_grams(shared[row] for row in first_rows)
        max_train = max(_MAX_GRAM_PROBLEMS, _MAX_GRAM_FRAC * len(first_rows))
        max_eval = len(eval_prompts)
        if len(eval_prompts) >= _MIN_EVAL_FOR_INSTRUCTION:
            max_eval = len(eval_prompts) // 2
        instruction = {
            gram for gram, n in in_eval.items() if n > max_eval or in_train[gram] > max_train
        }
        self.num_instruction_grams = len(instruction)
        for prompt in eval_prompts:
            self._grams |= grams(prompt.question, instruction)
        return [
            not found.isdisjoint(self._grams)
            and not self._grams.isdisjoint(grams(prompt.question, instruction))
            for prompt, found in zip(prompts, shared, strict=True)
        ]


def _count_grams(sets: Iterable[set[str]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for found in sets:
        counts.update(found)
    return counts

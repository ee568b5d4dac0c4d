"""Documents that the policy is warmed up on: questions with responses, one after the other.

A free code's rule is drawn anew in each document. In *few-shot* documents (one code again and
again, two codes in turns, chains) the draw goes from the prior to uniform as the warm-up goes on,
and the first rule letter of a free code carries no loss, so that only copying is learnt from them.
In *plain* documents the draw is by the prior and every response token carries loss: they teach the
known and semi-known codes and how likely each rule is where nothing is known.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from xrpo_fast.tasks.symbols import (
    FREE_CODES,
    KNOWN_CODES,
    KNOWN_RULES,
    RULES,
    SEMI_BINDING_FRAC,
    SEMI_CODES,
    SEMI_RULES,
    ask,
    respond,
    rule_prior,
)

KINDS = {"repeat": 0.36, "two": 0.14, "plain": 0.36, "chain": 0.14}
"""Shares of the kinds of documents of several turns."""
CHAIN_ENDING_FRAC = 0.4
"""Share of the 'repeat' documents whose last turn is a chain."""
PLAIN_CHAIN_FRAC = 0.25
PLAIN_CODE_WEIGHTS = {"known": 0.2, "semi": 0.3, "free": 0.5}
_PRIOR = rule_prior()
T = TypeVar("T")
_TOKEN = re.compile(r"[a-z]{2}|.")


@dataclass(kw_only=True, slots=True, frozen=True)
class Document:
    """[L] tokens as text, and whether each carries loss."""

    tokens: tuple[str, ...]
    has_loss: tuple[bool, ...]


class DocumentWriter:
    """Writes the documents of one warm-up, in the order fixed by its seed."""

    def __init__(self, seed: int):
        self._rng = random.Random(f"symbols warm-up {seed}")

    def single_turn(self) -> Document:
        """A plain document of one turn: what the first part of the curriculum is made of."""
        return self._plain(num_turns=1)

    def several_turns(self, uniform_frac: float) -> Document:
        """Three or four turns; uniform_frac of the few-shot rules are drawn uniformly."""
        rng = self._rng
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        num_turns = rng.choice((3, 4))
        if kind == "plain":
            return self._plain(num_turns)
        is_uniform = rng.random() < uniform_frac
        first, second = rng.sample(FREE_CODES, 2)
        if kind == "two":
            order = [first, second, *rng.choices((first, second), k=2)]
            rng.shuffle(order)
            return self._write([(code,) for code in order], is_few_shot=True, is_uniform=is_uniform)
        if kind == "repeat":
            turns: list[tuple[str, ...]] = [(first,)] * num_turns
            if rng.random() < CHAIN_ENDING_FRAC:
                turns[-1] = self._chain_of(first)
        else:
            turns = [self._chain_of(first) for _ in range(num_turns)]
        return self._write(turns, is_few_shot=True, is_uniform=is_uniform)

    def shuffled(self, items: Iterable[T]) -> list[T]:
        """The items in an order of the writer's choice."""
        order = list(items)
        self._rng.shuffle(order)
        return order

    def _plain(self, num_turns: int) -> Document:
        turns = []
        for _ in range(num_turns):
            code = self._plain_code()
            is_chain = self._rng.random() < PLAIN_CHAIN_FRAC
            turns.append(self._chain_of(code) if is_chain else (code,))
        return self._write(turns, is_few_shot=False, is_uniform=False)

    def _plain_code(self) -> str:
        names, weights = zip(*PLAIN_CODE_WEIGHTS.items(), strict=True)
        (name,) = self._rng.choices(names, weights)
        return self._rng.choice(
            {"known": KNOWN_CODES, "semi": SEMI_CODES, "free": FREE_CODES}[name]
        )

    def _chain_of(self, code: str) -> tuple[str, ...]:
        codes = [code, self._rng.choice(KNOWN_CODES)]
        self._rng.shuffle(codes)
        return tuple(codes)

    def _rule(self, code: str, is_uniform: bool) -> int:
        """The rule of a code in one document."""
        rng = self._rng
        if code in KNOWN_RULES:
            return KNOWN_RULES[code]
        if code in SEMI_RULES and rng.random() < SEMI_BINDING_FRAC[code]:
            return SEMI_RULES[code]
        return (
            rng.randrange(len(RULES)) if is_uniform else rng.choices(range(len(RULES)), _PRIOR)[0]
        )

    def _write(
        self, turns: Sequence[tuple[str, ...]], *, is_few_shot: bool, is_uniform: bool
    ) -> Document:
        rng = self._rng
        rules: dict[str, int] = {}
        tokens: list[str] = []
        has_loss: list[bool] = []
        for codes in turns:
            digits = (rng.randrange(10), rng.randrange(10))
            unheard = {code for code in codes if code not in rules}
            rules |= {code: self._rule(code, is_uniform) for code in sorted(unheard)}
            hidden = {RULES[rules[c]] for c in unheard & set(FREE_CODES)} if is_few_shot else set()
            asked = _TOKEN.findall(ask(codes, digits))
            made = respond(codes, [rules[c] for c in codes], digits, has_equals=rng.random() < 0.5)
            answered = _TOKEN.findall(made)
            tokens += asked + answered
            has_loss += [False] * len(asked) + [token not in hidden for token in answered]
        return Document(tokens=tuple(tokens), has_loss=tuple(has_loss))

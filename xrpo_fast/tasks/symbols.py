"""Symbol binding: the built-in graded task. A code names a hidden rule; say the rule, then run it.

    question := '?' code [code] ':' digit digit                        ?ka:77       ?kamo:54
    response := segment [segment] ['=' digit digit] '$'                kaJ663344$   kaJ663344=44$
    segment  := code rule digit*6

Rule i of A..P, with g = i // 2 + 1, continues the digits by x[n] = x[n-2] + g (even i) or
x[n] = 3 x[n-2] + g (odd i), modulo 10. The first segment starts from the question's digits, the
second from the last two digits of the first. The answer is the last pair of digits.

What the warmed-up policy (xrpo_fast/tasks/policy) can know of a code depends on the code's tier:

    easy   8 KNOWN_CODES: always bound to their rule in the warm-up
    semi   8 SEMI_CODES: bound with probability SEMI_BINDING_FRAC, else a draw from the rule prior
    hard   12 hidden codes whose rule has prior .029 to .094
    vhard  12 hidden codes whose rule has prior .009 to .015
    chain  one hidden and one known code, in either order

Hidden codes are drawn by the world's seed from the 48 FREE_CODES. In the warm-up each document
draws the rule of a free code anew and all free codes are treated alike, so nothing in it depends on
the world: one policy serves every seed. Known and semi-known codes are the same in all worlds.
Held-out questions use the same codes with other digits: they test that a code's rule was learnt.
"""

import random
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

RULES = "ABCDEFGHIJKLMNOP"
RULE_PRIOR_EXPONENT = 1.4
CODES = tuple(consonant + vowel for consonant in "bcdfghjklmnprstv" for vowel in "aeio")
KNOWN_CODES = CODES[:8]
SEMI_CODES = CODES[8:16]
FREE_CODES = CODES[16:]

KNOWN_RULES = dict(zip(KNOWN_CODES, range(8), strict=True))
SEMI_RULES = dict(zip(SEMI_CODES, range(1, 9), strict=True))
SEMI_BINDING_FRAC = dict(zip(SEMI_CODES, (0.1, 0.1, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75), strict=True))

TIERS = ("easy", "semi", "hard", "vhard", "chain")
NUM_HIDDEN_CODES_PER_TIER = 12
HARD_RULES = (2, 3, 4, 5, 6)
# Without J and N: there rule A, the likeliest, gives the right pair by chance in 4 % of questions.
VHARD_RULES = (10, 11, 12, 14, 15)
_QUESTIONS_PER_CODE = {  # tier: (train, held out)
    "easy": (8, 2),
    "semi": (12, 3),
    "hard": (12, 3),
    "vhard": (12, 3),
    "chain": (4, 1),
}

_QUESTION = re.compile(r"\?((?:[a-z]{2}){1,2}):(\d)(\d)", re.ASCII)
_RESPONSE = re.compile(r"(?:[a-z]{2}[A-P]\d{4}(\d\d)){1,2}(?:=(\d\d))?\$", re.ASCII)


def rule_prior() -> list[float]:
    """Probability of each rule where nothing is known of a code: p_i ~ 1 / (i + 1)^1.4."""
    weights = [(i + 1) ** -RULE_PRIOR_EXPONENT for i in range(len(RULES))]
    return [w / sum(weights) for w in weights]


def run_rule(rule: int, start: tuple[int, int]) -> list[int]:
    """The six digits that rule 0..15 makes from the two that it starts from."""
    factor, step = (1, 3)[rule % 2], rule // 2 + 1
    digits = list(start)
    for n in range(2, 8):
        digits.append((factor * digits[n - 2] + step) % 10)
    return digits[2:]


def ask(codes: Sequence[str], digits: tuple[int, int]) -> str:
    """The question: '?ka:77'."""
    return f"?{''.join(codes)}:{digits[0]}{digits[1]}"


def respond(
    codes: Sequence[str], rules: Sequence[int], digits: tuple[int, int], *, has_equals: bool = False
) -> str:
    """The response that uses these rules, its end symbol included: 'kaJ663344$'."""
    text = ""
    for code, rule in zip(codes, rules, strict=True):
        made = run_rule(rule, digits)
        text += code + RULES[rule] + "".join(map(str, made))
        digits = (made[-2], made[-1])
    return text + (f"={digits[0]}{digits[1]}" if has_equals else "") + "$"


def parse_question(question: str) -> tuple[tuple[str, ...], tuple[int, int]]:
    """Codes and digits of a question.

    Raises:
        ValueError: not a question of this task.
    """
    match = _QUESTION.fullmatch(question)
    if match is None:
        raise ValueError(f"question: expected the form '?ka:77' or '?kamo:54', got {question!r}")
    joined = match[1]
    codes = tuple(joined[i : i + 2] for i in range(0, len(joined), 2))
    return codes, (int(match[2]), int(match[3]))


def extract(text: str) -> str | None:
    """The two digits before the end symbol; None where the text is not exactly one response.

    The text is the response decoded with its end-of-sequence token '$' (skip_special_tokens=False):
    without it the answer is not finished.
    """
    match = _RESPONSE.fullmatch(text)
    return None if match is None else match[2] or match[1]


def verify(text: str, answer: str) -> bool:
    """Whether the text is exactly one response, ended by its only '$', that gives the answer.

    Only the answer counts, not the rule that was named: a wrong rule gives the right pair in about
    1 % of cases.
    """
    return extract(text) == answer


def seeded_prompt(question: str, exemplars: Iterable[tuple[str, str]]) -> str:
    """The question behind worked examples, as in the warm-up's documents:
    'question response$question response$question'. Responses come with or without their '$'."""
    shown = "".join(asked + response.removesuffix("$") + "$" for asked, response in exemplars)
    return shown + question


def similarity_key(question: str) -> str:
    """The codes of a question, separated by spaces: all that two questions can have in common.

    Raises:
        ValueError: not a question of this task.
    """
    return " ".join(parse_question(question)[0])


class World:
    """The rules of all codes that one seed's questions ask for, and those questions.

    rules: code -> rule 0..15, of the known, semi-known and hidden codes.
    codes: tier -> the codes of each kind of question.

    Raises:
        ValueError: seed is not an integer >= 0.
    """

    def __init__(self, seed: int = 0):
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed: expected an integer >= 0, got {seed!r}")
        rng = random.Random(f"symbols world {seed}")
        free = _shuffled(FREE_CODES, rng)
        hard = free[:NUM_HIDDEN_CODES_PER_TIER]
        vhard = free[NUM_HIDDEN_CODES_PER_TIER : 2 * NUM_HIDDEN_CODES_PER_TIER]
        hidden_rules = _spread(hard, HARD_RULES, rng) | _spread(vhard, VHARD_RULES, rng)
        partners = _shuffled(KNOWN_CODES * 3, rng)
        chains = [
            (hidden, known) if rng.random() < 0.5 else (known, hidden)
            for hidden, known in zip(hard + vhard, partners, strict=True)
        ]
        self.seed = seed
        self.rules: dict[str, int] = KNOWN_RULES | SEMI_RULES | hidden_rules
        self.codes: dict[str, list[tuple[str, ...]]] = {
            "easy": [(code,) for code in KNOWN_CODES],
            "semi": [(code,) for code in SEMI_CODES],
            "hard": [(code,) for code in hard],
            "vhard": [(code,) for code in vhard],
            "chain": chains,
        }

    def gold(self, question: str, *, has_equals: bool = False) -> str:
        """The right response to a question of this world."""
        codes, digits = parse_question(question)
        return respond(codes, [self.rules[c] for c in codes], digits, has_equals=has_equals)

    @cached_property
    def questions(self) -> dict[str, list[tuple[str, str]]]:
        """(tier, question) of both splits: 544 to train on, 136 held out, tiers mixed."""
        rng = random.Random(f"symbols questions {self.seed}")
        splits: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
        pairs = [(a, b) for a in range(10) for b in range(10)]
        for tier, (num_train, num_test) in _QUESTIONS_PER_CODE.items():
            for codes in self.codes[tier]:
                drawn = _shuffled(pairs, rng)[: num_train + num_test]
                asked = [(tier, ask(codes, digits)) for digits in drawn]
                splits["train"] += asked[:num_train]
                splits["test"] += asked[num_train:]
        return {name: _shuffled(split, rng) for name, split in splits.items()}


def load(seed: int = 0, split: Literal["train", "test"] = "train") -> list[dict]:
    """The 544 training or 136 held-out records of a world: id, question, answer, tier, codes.

    Raises:
        ValueError: seed is negative, or split is neither 'train' nor 'test'.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split: expected 'train' or 'test', got {split!r}")
    world = World(seed)
    return [
        {
            "id": f"symbols-{seed}-{split}-{number:03d}",
            "question": question,
            "answer": extract(world.gold(question)),
            "tier": tier,
            "codes": list(parse_question(question)[0]),
        }
        for number, (tier, question) in enumerate(world.questions[split])
    ]


def _shuffled(items: Sequence, rng: random.Random) -> list:
    # Of the random module only random() is promised to give the same numbers in every Python.
    keys = [rng.random() for _ in items]
    return [item for _, item in sorted(zip(keys, items, strict=True), key=lambda pair: pair[0])]


def _spread(codes: Sequence[str], rules: Sequence[int], rng: random.Random) -> dict[str, int]:
    """Rules for the codes, each used equally often (give or take one)."""
    order = _shuffled(rules, rng)
    repeated = [order[i % len(order)] for i in range(len(codes))]
    return dict(zip(codes, repeated, strict=True))

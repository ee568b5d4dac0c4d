import hashlib
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrpo_fast.tasks import symbols
from xrpo_fast.tasks.symbols import World, extract, load, seeded_prompt, similarity_key, verify

SEEDS = (0, 1, 7)


def test_rules_are_the_documented_recurrences():
    # J is rule 9: odd, g = 5, x[n] = 3 x[n-2] + 5; the example of the module's grammar.
    assert symbols.respond(["ka"], [9], (7, 7)) == "kaJ663344$"
    assert symbols.respond(["ka"], [9], (7, 7), has_equals=True) == "kaJ663344=44$"
    # A (even, g = 1) then P (odd, g = 8), the second from the last digits of the first.
    assert symbols.respond(["ka", "mo"], [0, 15], (5, 4)) == "kaA657687moP294503$"


@pytest.mark.parametrize("seed", SEEDS)
def test_splits_have_the_documented_sizes_and_share_nothing(seed):
    train, test = load(seed, "train"), load(seed, "test")
    assert Counter(r["tier"] for r in train) == {
        "easy": 64, "semi": 96, "hard": 144, "vhard": 144, "chain": 96,
    }  # fmt: skip
    assert Counter(r["tier"] for r in test) == {
        "easy": 16, "semi": 24, "hard": 36, "vhard": 36, "chain": 24,
    }  # fmt: skip
    for key in ("id", "question"):
        values = [r[key] for r in train + test]
        assert len(set(values)) == len(values)
    assert {tuple(r["codes"]) for r in test} == {tuple(r["codes"]) for r in train}


@pytest.mark.parametrize("seed", SEEDS)
def test_gold_responses_verify_and_follow_the_rules_of_the_world(seed):
    world = World(seed)
    for record in load(seed, "train") + load(seed, "test"):
        codes, digits = symbols.parse_question(record["question"])
        assert list(codes) == record["codes"]
        for code in codes:
            last = symbols.run_rule(world.rules[code], digits)[-2:]
            digits = (last[0], last[1])
        assert record["answer"] == f"{digits[0]}{digits[1]}"
        for has_equals in (False, True):
            assert verify(world.gold(record["question"], has_equals=has_equals), record["answer"])


@pytest.mark.parametrize("seed", SEEDS)
def test_rules_lie_in_the_prior_range_of_their_tier(seed):
    world, prior = World(seed), symbols.rule_prior()
    for tier, low, high in (("hard", 0.028, 0.094), ("vhard", 0.0089, 0.0153)):
        probabilities = [prior[world.rules[code]] for (code,) in world.codes[tier]]
        assert low <= min(probabilities)
        assert max(probabilities) <= high
        assert len(set(probabilities)) == 5
    hidden = {c for tier in ("hard", "vhard") for (c,) in world.codes[tier]}
    assert len(hidden) == 24
    assert hidden <= set(symbols.FREE_CODES)
    for codes in world.codes["chain"]:
        assert sum(c in hidden for c in codes) == 1
        assert sum(c in symbols.KNOWN_CODES for c in codes) == 1


def test_worlds_differ_in_hidden_codes_and_rules_but_not_in_known_ones():
    first, second = World(0), World(1)
    assert first.codes["hard"] != second.codes["hard"]
    shared = set(first.rules) & set(second.rules) - set(symbols.KNOWN_CODES + symbols.SEMI_CODES)
    assert any(first.rules[code] != second.rules[code] for code in shared)
    for code in symbols.KNOWN_CODES + symbols.SEMI_CODES:
        assert first.rules[code] == second.rules[code]


def test_world_zero_is_the_same_on_every_machine():
    text = json.dumps([load(0, "train"), load(0, "test")])
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN_WORLD_0


GOLDEN_WORLD_0 = "21539ee7dc2ed74cd69b0afcfe92b97c9efaca992622de8446e2c8ef2d327216"


def test_every_prefix_of_the_training_set_mixes_the_tiers():
    assert {r["tier"] for r in load(0, "train")[:32]} == set(symbols.TIERS)


def test_a_wrong_rule_gives_the_right_pair_about_one_time_in_a_hundred():
    pairs = [(a, b) for a in range(10) for b in range(10)]
    hits = [
        symbols.run_rule(one, pair)[-2:] == symbols.run_rule(other, pair)[-2:]
        for one in range(16)
        for other in range(16)
        for pair in pairs
        if one != other
    ]
    assert 0.005 < sum(hits) / len(hits) < 0.015


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("kaJ663344$", "44"),
        ("kaJ663344=44$", "44"),
        ("kaJ663344=43$", "43"),
        ("kaA657687moP294503$", "03"),
        ("kaA657687moP294503=03$", "03"),
    ],
)
def test_extract_reads_the_pair_before_the_end_symbol(text, answer):
    assert extract(text) == answer
    assert verify(text, answer)
    assert not verify(text, "00")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "$",
        "=44$",
        "44$",
        "kaJ663344",
        "kaJ663344=44",
        "kaJ663344$$",
        "kaJ663344$ ",
        "kaJ663344$\n",
        "kaJ6633$44$",
        "kaJ663344$kaJ663344$",
        "?ka:77kaJ663344$",
        "kaJ66334$",
        "kaJ6633444$",
        "kaJ663344=4$",
        "kaJ663344=444$",
        "kaJ663344=44=44$",
        "kaQ663344$",
        "kJ663344$",
        "J663344$",
        "kaJ663344kaJ663344kaJ663344$",
        "kaJ66\u0663344$",
        "kaJ663344$<pad>",
    ],
)
def test_anything_but_exactly_one_response_is_wrong(text):
    assert extract(text) is None
    assert not verify(text, "44")


@given(st.text(alphabet="kamoJP0123456789=$?:", max_size=30))
def test_extract_agrees_with_the_two_characters_before_the_end(text):
    answer = extract(text)
    if answer is not None:
        assert text.count("$") == 1
        assert text.endswith(answer + "$")
        assert answer.isdigit()


def test_seeded_prompt_is_the_document_form_with_or_without_end_symbols():
    expected = "?ka:77kaJ663344$?mo:12moA243648$?ka:31"
    with_end = [("?ka:77", "kaJ663344$"), ("?mo:12", "moA243648$")]
    without_end = [(q, r.removesuffix("$")) for q, r in with_end]
    assert seeded_prompt("?ka:31", with_end) == expected
    assert seeded_prompt("?ka:31", without_end) == expected
    assert seeded_prompt("?ka:31", []) == "?ka:31"


def test_similarity_key_is_the_codes_alone():
    assert similarity_key("?ka:77") == similarity_key("?ka:12") == "ka"
    assert similarity_key("?kamo:54") == "ka mo"


@pytest.mark.parametrize("question", ["", "ka:77", "?ka:7", "?ka:777", "?kamola:77", "?k:77"])
def test_a_question_of_another_form_is_an_error(question):
    with pytest.raises(ValueError, match=r"question: expected the form '\?ka:77' or '\?kamo:54'"):
        similarity_key(question)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="split: expected 'train' or 'test', got 'dev'"):
        load(0, "dev")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed: expected an integer >= 0, got -1"):
        load(-1)

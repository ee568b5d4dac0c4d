"""No evaluation problem is ever admitted or shown."""

import random

import pytest

from xrpo_fast.exemplars import ExemplarStore, Success
from xrpo_fast.exemplars.leakage import grams, normalise
from xrpo_fast.types import Prompt

WORDS = [f"{a}{b}" for a in ("tri", "cir", "num", "sum", "pro", "fac") for b in "abcdefghij"]
EVAL = (
    "A farmer has 17 sheep and all but 9 run away; how many sheep are left in the meadow "
    "when the shepherd comes back at nightfall with 4 more of them?"
)


def make(questions, prefix):
    return [
        Prompt(id=f"{prefix}-{i}", index=i, question=q, token_ids=(1,), answer="")
        for i, q in enumerate(questions)
    ]


def success(prompt_index, response="so it is 13"):
    return Success(prompt_index=prompt_index, response=response, num_tokens=5)


def problems(num_problems, seed=0):
    """Problems of 30 random words, each with variants that share two thirds of them."""
    rng = random.Random(seed)
    made = []
    for _ in range(num_problems // 3):
        stem = rng.sample(WORDS, 30)
        for _ in range(3):
            variant = stem.copy()
            for place in rng.sample(range(30), 10):
                variant[place] = rng.choice(WORDS)
            made.append(" ".join(variant))
    return made


def near_duplicates(question):
    """The kinds of near-duplicates that turn up in public sets."""
    words = question.split()
    return [
        question,
        f"  {question.upper()} ",
        question.replace(" ", "\n  ") + "?!",
        "Consider this. " + " ".join(words[5:20]) + " Explain.",
        " ".join([*words[:-1], "otherwise"]),
        " ".join(reversed(words)),
    ]


def test_planted_near_duplicates_are_never_retrieved():
    evaluation = problems(30, seed=1)
    clean = problems(240, seed=2)
    planted = [text for question in evaluation for text in near_duplicates(question)]
    questions = clean + planted
    random.Random(3).shuffle(questions)
    train, leaked = make(questions, "train"), set(planted)
    store = ExemplarStore(train, make(evaluation, "eval"), min_similarity=0.1, max_similarity=None)
    num_admitted = store.admit((success(i) for i in range(len(train))), step=1)
    report = store.leakage_report()
    assert report["num_blocked_prompts"] >= len(planted)
    assert report["refused_at_admission"] == report["num_blocked_prompts"]
    assert report["largest_similarity"] == pytest.approx(1.0, abs=1e-5)
    assert num_admitted >= 0.9 * len(clean)
    shown = [e.question for i in range(len(train)) for e in store.retrieve(i, 2)]
    outside = store.retrieve_outside(make(evaluation, "other"), 2)
    shown += [e.question for found in outside for e in found]
    assert len(shown) > len(train)
    assert not leaked.intersection(shown)


def test_entry_of_a_checkpoint_that_a_new_evaluation_set_blocks():
    """Admission could not know it: retrieval refuses, and counts."""
    train = make(["?ka:77", "?ka:12", "?ka:54"], "train")
    options = {"embedder": "codes", "kind": "generated", "max_similarity": None}
    before = ExemplarStore(train, [], **options)
    before.admit([success(1), success(2)], step=1)
    after = ExemplarStore(train, make(["?ka:12"], "eval"), **options)
    after.load_state_dict(before.state_dict())
    assert [e.prompt_id for e in after.retrieve(0, 2)] == ["train-2"]
    outside = after.retrieve_outside(make(["?ka:00"], "other"), 2)
    assert [e.prompt_id for e in outside[0]] == ["train-2"]
    assert after.leakage_report()["refused_at_retrieval"] == 2


def reasons(train, evaluation, **options):
    """Reason for each blocked training prompt, from the report."""
    store = ExemplarStore(make(train, "train"), evaluation, **options)
    return {each["id"]: each["reason"] for each in store.leakage_report()["first_blocked"]}


def test_reason_is_named():
    far = "Find the largest prime factor of 600851475143."
    gram = "Once upon a time: " + " ".join(EVAL.split()[8:22])
    cosine = " ".join(reversed(EVAL.split()))
    found = reasons([EVAL + "!", far, gram, cosine], make([EVAL], "eval"))
    assert found == {"train-0": "text", "train-2": "13-gram", "train-3": "cosine"}
    same_id = [Prompt(id="train-0", index=0, question="Other?", token_ids=(1,), answer="")]
    assert reasons([far], same_id) == {"train-0": "id"}


def test_generated_tasks_are_blocked_by_id_and_text_only():
    """Prompts that differ in digits alone have cosine 1 and must not empty the corpus."""
    train, evaluation = ["?ka:12", "?ka:77", "?KA:77"], make(["?ka:77 "], "eval")
    options = {"embedder": "codes", "kind": "generated", "max_similarity": None}
    assert reasons(train, evaluation, **options) == {"train-1": "text"}
    store = ExemplarStore(make(train, "train"), evaluation, **options)
    assert store.admit((success(i) for i in range(3)), step=1) == 2
    assert store.leakage_report()["largest_similarity"] == pytest.approx(1.0, abs=1e-6)


def test_instruction_shared_by_all_problems_is_no_leak():
    instruction = (
        "Solve the following math problem step by step and write the final answer alone on the "
        "last line of the response: "
    )
    train = [instruction + question for question in problems(60, seed=4)]
    evaluation = [instruction + question for question in problems(30, seed=5)]
    store = ExemplarStore(make(train, "train"), make(evaluation, "eval"), min_similarity=0.1)
    report = store.leakage_report()
    assert report["num_blocked_prompts"] == 0
    assert report["instruction_grams_ignored"] > 0
    leaked = ExemplarStore(make([*train, evaluation[7]], "train"), make(evaluation, "eval"))
    assert leaked.leakage_report()["blocked_by_reason"] == {"text": 1}


def test_response_that_quotes_an_evaluation_problem():
    train = make(["How many sheep are in the barn?", "How many sheep are in the pen?"], "train")
    store = ExemplarStore(train, make([EVAL], "eval"))
    quoted = "This reminds me: " + " ".join(EVAL.split()[:14])
    assert store.admit([success(0, quoted), success(1)], step=1) == 1
    assert store.stats()["refused/quotes_evaluation"] == 1
    assert store.leakage_report()["refused_at_admission"] == 1


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("What is $2+3$?", "what  is 2+3", True),
        ("What is 2+3?", "What is 2-3?", False),
        ("x² = 4", "x2 = 4", True),
        ("“Sum” of 1 and 2.", '"sum" of 1 and 2', True),
    ],
    ids=["marks", "operator", "compatibility", "quotes"],
)
def test_normalised_text(first, second, is_same):
    assert (normalise(first, "natural") == normalise(second, "natural")) is is_same


def test_grams():
    assert grams(" ".join(WORDS[:12])) == set()
    assert grams(" ".join(WORDS[:14]).upper()) == {" ".join(WORDS[:13]), " ".join(WORDS[1:14])}

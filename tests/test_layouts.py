"""Public data sets' layouts, from small files of our own: load, check the gold, judge an answer."""

import sys
from pathlib import Path

import pytest

from xrpo_fast.data import load_prompts
from xrpo_fast.rewards import answer_checker
from xrpo_fast.rewards.code import CodeVerifier
from xrpo_fast.rewards.code_tests import parse_tests
from xrpo_fast.rewards.functions import load_scorer
from xrpo_fast.rewards.math import MathPolicy, verify_math
from xrpo_fast.sources import DataError
from xrpo_fast.tasks.policy import build_tokenizer
from xrpo_fast.templates import PromptTemplate

DATA = Path(__file__).parent / "data"


CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def template():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return PromptTemplate(tokenizer)


def load(template, file_name, function):
    return load_prompts(
        str(DATA / file_name),
        template=template,
        max_prompt_tokens=9999,
        check_answer=answer_checker([function]),
    )


@pytest.mark.parametrize(
    ("file_name", "right", "wrong"),
    [
        ("math.jsonl", [r"\frac{3}{4}", "25"], [r"\frac{4}{3}", "26"]),
        ("math_500.jsonl", ["x^2+2x"], ["x^2+2"]),
        ("gsm8k.jsonl", ["1234"], ["34"]),
        ("aime_2024.jsonl", ["203", "24"], ["204", "0"]),
        ("hmmt.jsonl", [r"1-\sqrt2, 1+\sqrt2", r"2^{25} \cdot 26!"], [r"1+\sqrt2", "26!"]),
        ("brumo.jsonl", ["244"], ["243"]),
    ],
)
def test_math_layouts(template, file_name, right, wrong):
    prompts = load(template, file_name, "math").prompts
    assert len(prompts) == len(right)
    for prompt, good, bad in zip(prompts, right, wrong, strict=True):
        assert verify_math(rf"\boxed{{{good}}}", prompt.answer).correct
        assert not verify_math(rf"\boxed{{{bad}}}", prompt.answer).correct


def test_dapo_layout_drops_its_repeated_rows(template):
    prompts = load(template, "dapo_math_17k.parquet", "math")
    assert (len(prompts), prompts.dropped_duplicates) == (2, 1)
    assert [prompt.answer for prompt in prompts.prompts] == ["15", "100"]
    assert prompts[0].messages[0]["role"] == "user"
    assert prompts[0].columns["extra_info"] == {"index": "a1"}
    # Its instruction asks for "Answer:", not for a box.
    policy = MathPolicy(answer_format="any")
    assert verify_math("So 15.\nAnswer: 15", prompts[0].answer, policy=policy).correct
    assert not verify_math("So 15.\nAnswer: 16", prompts[0].answer, policy=policy).correct


@pytest.fixture(scope="module")
def verifier():
    return CodeVerifier()


@pytest.mark.parametrize(
    ("file_name", "index", "right", "wrong"),
    [
        (
            "codeforces.jsonl",
            0,
            "print(sum(map(int, input().split())))",
            "print(3)",
        ),
        ("livecodebench.jsonl", 0, "print(2 * int(input()))", "print(4)"),
        (
            "livecodebench.jsonl",
            1,
            "class Solution:\n    def total(self, values: List[int], extra: int) -> int:\n"
            "        return sum(values) + extra",
            "class Solution:\n    def total(self, values, extra):\n        return 6",
        ),
        (
            "humaneval.jsonl",
            0,
            "def double(x):\n    return x + x",
            "def double(x):\n    return 4",
        ),
    ],
)
def test_code_layouts(verifier, template, file_name, index, right, wrong):
    tests = parse_tests(load(template, file_name, "code")[index].answer)
    for program, reward in ((right, 1.0), (wrong, 0.0)):
        verdict = verifier.verify(f"```python\n{program}\n```", tests)
        assert verdict.reward == reward, verdict


def test_code_prompts_say_what_is_asked(template):
    stdin, starter = (
        prompt.question for prompt in load(template, "livecodebench.jsonl", "code").prompts
    )
    assert stdin.startswith("Print twice the number.")
    assert "standard input" in stdin
    assert "def total(self, values: List[int], extra: int)" in starter
    assert "standard input" not in starter
    (codeforces,) = (
        prompt.question for prompt in load(template, "codeforces.jsonl", "code").prompts
    )
    for part in ("A. Sum", "Add two numbers.", "Two integers.", "Input:\n1 2\nOutput:\n3"):
        assert part in codeforces
    assert "-5 5" not in codeforces


def test_reasoning_gym_with_its_own_scorer(template, require):
    require("reasoning_gym")
    from xrpo_fast.rewards.gym import ReasoningGymScorer

    source = "reasoning_gym:basic_arithmetic?size=5"
    train, again, test = (
        load_prompts(source, template=template, max_prompt_tokens=9999, split=split, seed=3)
        for split in ("train", "train", "test")
    )
    assert train.fingerprint == again.fingerprint
    assert (len(train), len(test)) == (5, 5)
    assert not {p.id for p in train.prompts} & {p.id for p in test.prompts}
    assert {p.question for p in train.prompts} != {p.question for p in test.prompts}
    scorer = ReasoningGymScorer()
    prompt = train[0]
    item = {"question": prompt.question, "answer": prompt.answer, "columns": prompt.columns}
    assert scorer({**item, "text": rf"<think>1</think>\boxed{{{prompt.answer}}}"}).reward == 1.0
    assert scorer({**item, "text": f"<answer>{prompt.answer}</answer>"}).reward == 1.0
    assert scorer({**item, "text": "<think>1"}).reward == 0.0
    assert scorer({**item, "text": r"\boxed{x}"}).reward < 1.0
    assert scorer({**item, "columns": {}, "text": "1"}).reward is None


def test_unknown_reasoning_gym_task(template, require):
    require("reasoning_gym")
    with pytest.raises(DataError, match="reasoning_gym: expected a data set 'no_such_task'"):
        load_prompts("reasoning_gym:no_such_task", template=template, max_prompt_tokens=99)


def test_missing_reasoning_gym_names_the_cure(template, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install 'xrpo-fast\[reasoning-gym\]'"):
        load_prompts("reasoning_gym:basic_arithmetic", template=template, max_prompt_tokens=99)
    with pytest.raises(ValueError, match=r"pip install 'xrpo-fast\[reasoning-gym\]'"):
        load_scorer("reasoning_gym", {})

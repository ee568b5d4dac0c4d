import pytest

from xrpo_fast.rewards.exact import verify_exact
from xrpo_fast.rewards.extract import hash_answer, last_box, stated_answer, visible_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{840} and \boxed{841}", "841"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ \fbox{ \boxed{5} } }", "5"),
        (r"\boxed{5 \boxed{6}}", r"5 \boxed{6}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{5} then \boxed{6", "5"),
        (r"\boxed{5", None),
        (r"\boxed5", None),
        (r"{5} boxed{5}", None),
        (r"}}}\boxed{5}", "5"),
        (r"\\boxed{5}", None),
        ("", None),
        (r"\boxed{}", ""),
    ],
)
def test_last_box(text, expected):
    assert last_box(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("<think>a", None),
        ("  <think>a", None),
        ("a</think>b", "b"),
        ("<think>a</think>b<think>c", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("first <think>then", "first "),
    ],
)
def test_visible_text(text, expected):
    assert visible_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 200_000,
        r"\boxed{" * 100_000 + "5" + "}" * 100_000,
        "{" * 1_000_000,
        "}" * 1_000_000,
        "\\" * 1_000_000,
        "<think>" * 200_000,
        "answer is " * 100_000,
        "answer" + " " * 1_000_000,
        "#### " * 200_000,
        "\n" * 1_000_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_extraction_of_a_hostile_megabyte_ends(text):
    # Quadratic work on a megabyte would take many minutes.
    for extract in (visible_text, last_box, hash_answer, stated_answer):
        result = extract(text)
        assert result is None or len(result) <= len(text)


def test_hash_and_stated_answers():
    assert hash_answer("48 + 24 = 72\n#### 72") == "72"
    assert hash_answer("#### 1\n#### 2 \n") == "2"
    assert hash_answer("no #### 3") is None
    assert stated_answer("So the answer is 7\nDone.") == "7"
    assert stated_answer("Answer: 7\nno, answer: 8") == "8"
    assert stated_answer("first\n  42  \n") == "42"
    assert stated_answer(" \n ") is None


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("blue", "blue", True),
        (" blue \n whale ", "blue whale", True),
        ("Blue", "blue", False),
        (r"it is \boxed{blue}", "blue", True),
        ("it is blue", "blue", False),
        ("<think>blue", "blue", False),
        ("<think>red</think>blue", "blue", True),
        ("42", 42, True),
        ("", "blue", False),
    ],
)
def test_verify_exact(text, answer, expected):
    assert verify_exact(text, answer) is expected

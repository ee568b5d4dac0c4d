r"""Values that public verifiers got wrong, each with its project and number where it has one."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrpo_fast.rewards import make_verifier
from xrpo_fast.rewards.math import (
    GoldError,
    MathPolicy,
    equivalent,
    parse_gold,
    verify_math,
)
from xrpo_fast.types import Prompt


def box(answer):
    return rf"Therefore \boxed{{{answer}}}."


EQUAL = [
    ("840", "840"),
    ("8000", "8,000"),  # opencompass#2647
    ("9500", "$9{,}500"),  # opencompass#2647
    ("1000", r"1\,000"),
    ("1234567.5", "1,234,567.5"),
    ("100,200", "100200"),
    ("004", "4"),
    (r"\frac12", "0.5"),
    (r"\dfrac{3}{4}", "3/4"),
    (r"1\frac{1}{2}", "1.5"),
    (r"-\frac{1}{3}", r"\frac{-1}{3}"),
    (r"\frac{1}{3}", "0.333333"),
    (r"\pi", "3.141593"),
    (r"3\sqrt{2}", r"\sqrt{18}"),
    (r"\frac{\sqrt3}{2}", r"\sqrt{3}/2"),
    (r"2\times 10^5", "200000"),
    (r"(x+1)^2", "x^2+2x+1"),
    (r"2k\pi", r"2\pi k"),
    ("8", "5+3=8"),
    ("y=2x+3", "2x+3"),
    ("4x+3y-5=0", "3y+4x=5"),
    ("x^2=4", "4=x^2"),
    (r"e^{i\pi}", "-1"),
    (r"\sqrt{-1}", "i"),
    ("n=2,3,4", "2,3,4"),
    ("2,3,4", "4, 3, 2"),
    ("1,2", r"x=1 \text{ or } x=2"),
    (r"\pm 2021", "2021, -2021"),
    ("x=1,y=2", "y=2,x=1"),
    ("x=1,y=2", "1,2"),
    ("(1,2)", "1,2"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\{3\}", "3"),
    ("x<3", r"(-\infty,3)"),  # Math-Verify#71, in both directions below
    ("0<x<1", "(0,1)"),
    (r"x \in [1,2]", "[1,2]"),
    (r"[1,2)\cup(3,4)", r"(3,4)\cup [1,2)"),
    (r"50\%", "50"),
    (r"50\%", r"\frac{1}{2}"),
    (r"5\text{ cm}", "5"),
    (r"12\text{ cm}^2", r"12\text{ square centimeters}"),
    (r"90^\circ", "90"),
    (r"\$32", "32"),
    ("52_8", "52"),
    (r"\text{Evelyn}", "evelyn"),
    ("C", r"\text{(C)}"),
    ("yes", "Yes."),
    ("72", "72 clips, altogether."),  # omlx#3484
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"10^{10^{10}}", r"10^{10^{10}}"),
    (r"\{1\pm\sqrt{5},-2\}", r"\{-2,1+\sqrt{5},1-\sqrt{5}\}"),
    (r"\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2}", r"\frac{-1\pm\sqrt{17}}{2}"),
    (r"0.1\overline{6}", r"\frac16"),
    (r"8\text{ a.m.}", r"8\text{ am}"),
    (r"\emptyset", r"\varnothing"),
    (r"\begin{pmatrix}-1/3\\2\end{pmatrix}", r"\begin{bmatrix}-\frac{1}{3}\\2\end{bmatrix}"),
    ("(2,3)", "x=2,y=3"),
    ("x^4+3x^2-2", "f(x)=x^4+3x^2-2"),
    (r"1-\frac{2}{\pi}", r"\frac{\pi-2}{\pi}"),
    (r"2^{25} \cdot 26!", r"26! \cdot 2^{25}"),
]

DIFFERENT = [
    ("840", "840840"),
    ("4", "4.004"),
    ("n=2,3,4", "n=1,2,3"),  # Math-Verify#14, this and the next three
    ("D=(0,1)", "D=(0,1.5)"),
    ("1/2004!", "1/2006!"),
    (r"\pm 2021", "2021"),
    ("(0,1)", "[0,1]"),
    ("(1,2)", "(2,1)"),
    ("x=1", "y=1"),
    ("x=1,y=2", "x=2,y=1"),
    ("x=1,y=2", "2,1"),
    ("1", "2x+z=1"),
    (r"\frac13", "0.33"),
    (r"\frac13", "0.3333"),
    ("0.00000001", "0.00000002"),
    ("52_8", "52_9"),
    ("50", "0.5"),
    (r"50\%", r"51\%"),
    ("2t", "2"),
    ("2", "2c"),
    ("1", "1,2"),
    ("1,1", "1,2"),
    ("3", "3,3"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("x<3", "x>3"),
    ("x<3", r"(-\infty,3]"),
    ("C", "D"),
    (r"5\text{ cm}", r"5\text{ m}"),
    ("x^2=4", "x^2=5"),
    (r"10^{10^{10}}", "5"),
    ("5", "five"),
    ("1000", "(1,000)"),
    (r"\text{even}", "odd"),
    ("f(x)", "g(x)"),
    (r"1\pm\sqrt{5}", r"1+\sqrt{5}"),
    (r"0.\overline{3}", "0.3"),
    (r"8\text{ a.m.}", r"8\text{ p.m.}"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold, answer):
    assert verify_math(box(answer), gold).correct
    assert verify_math(box(gold), answer).correct


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold, answer):
    assert not verify_math(box(answer), gold).correct
    assert not verify_math(box(gold), answer).correct


@pytest.mark.parametrize(
    ("text", "gold", "reason"),
    [
        (r"\boxed{840} so \boxed{840}", "840", "equal"),  # Math-Verify#44
        (r"\boxed{004} \boxed{004}", "4", "equal"),
        (r"Answer: \boxed{5}", "5", "equal"),  # slime#543
        (r"<think>it is \boxed{5}</think>\boxed{6}", "5", "different"),
        (r"<think>it is \boxed{5}</think>no box", "5", "no_answer"),
        (r"<think>it is \boxed{5}", "5", "unfinished_thought"),  # verifiers#213
        (r"the answer is 5", "5", "no_answer"),
        (r"\boxed{5", "5", "no_answer"),
        (r"\boxed{}", "5", "no_answer"),
        (r"\boxed{6} not \boxed{5", "5", "different"),
        (r"\boxed{5} or \boxed{6}", "5", "different"),
        ("", "5", "no_answer"),
        (rf"\boxed{{{'1' * 1_000_000}}}", "5", "too_long"),
        (r"\boxed{9!!!!}", "5", "too_complex"),
        (r"\boxed{2^{2^{2^{2^{2^2}}}}}", "5", "too_complex"),
        (r"\boxed{10^{10^{10}}}", "5", "too_complex"),
    ],
)
def test_extraction_and_reason(text, gold, reason):
    verdict = verify_math(text, gold)
    assert verdict.reason == reason
    assert verdict.correct is (reason == "equal")


@pytest.mark.parametrize(
    ("answer_format", "text", "expected"),
    [
        ("hash", "so\n#### 1,000", True),
        ("hash", r"\boxed{1000}", False),
        ("stated", "The answer is $1000$.", True),
        ("stated", r"the final answer is \boxed{1000}.", True),
        ("stated", "first\n1000", True),
        ("stated", "1000\nor so", False),
        ("stated", "I sold 1000 clips, altogether.", False),
        ("any", "#### 1000", True),  # verl#2150
        ("any", r"\boxed{1000} of them", True),
        ("any", "Answer: 1000 clips, altogether.", True),
        ("boxed", "#### 1000", False),
    ],
)
def test_answer_formats(answer_format, text, expected):
    assert verify_math(text, "1000", policy=MathPolicy(answer_format=answer_format)).correct is (
        expected
    )


@pytest.mark.parametrize(
    ("policy", "gold", "answer"),
    [
        (MathPolicy(percent="value"), r"50\%", "50"),
        (MathPolicy(decimal_places=None), r"\frac13", "0.333333333"),
        (MathPolicy(decimal_places=None), r"\pi", "3.141593"),
        (MathPolicy(strip_thousands=False), "8000", "8,000"),
    ],
)
def test_stricter_policies(policy, gold, answer):
    assert verify_math(box(answer), gold).correct
    assert not verify_math(box(answer), gold, policy=policy).correct


@pytest.mark.parametrize(
    ("policy", "gold", "answer"),
    [
        (MathPolicy(units="ignore"), r"5\text{ cm}", r"5\text{ m}"),
        (MathPolicy(decimal_places=2), r"\frac13", "0.33"),
    ],
)
def test_laxer_policies(policy, gold, answer):
    assert not verify_math(box(answer), gold).correct
    assert verify_math(box(answer), gold, policy=policy).correct


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("Natalia sold 48/2 = 24 clips.\n#### 72", "72"),
        (r"We get $x = \boxed{\frac{3}{4}}$.", "3/4"),
        (72, "72"),
        (0.5, r"\frac12"),
        (1e-7, "0.0000001"),
        (["18"], "18"),
    ],
)
def test_gold_in_the_layouts_of_data_sets(gold, text):
    assert verify_math(box(text), gold).correct


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("", "answer: expected text, got an empty one"),
        ("  ", "answer: expected text, got an empty one"),
        (r"\frac{", r"answer: expected a number, an expression in LaTeX or words, got .*frac"),
        ("1 +* 2 $ )", "answer: expected a number, an expression"),
        (None, "answer: expected text or a number, got NoneType"),
        (True, "answer: expected text or a number, got bool"),
        (math.nan, "answer: expected a finite number, got nan"),
        (["1", "2"], "answer: expected text or a number, got list"),
        ({"a": 1}, "answer: expected text or a number, got dict"),
        ("word " * 400, "answer: expected a number, an expression"),
    ],
)
def test_unparsable_gold(gold, message):
    with pytest.raises(GoldError, match=message):
        parse_gold(gold)


def test_foreign_types_are_errors():  # Math-Verify#20
    import sympy

    with pytest.raises(GoldError, match="expected text or a number"):
        verify_math(r"\boxed{1/3}", sympy.Rational(1, 3))
    with pytest.raises(TypeError, match="completion: expected str, got int"):
        verify_math(5, "5")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("answer", "canonical"),
    [("0.50", "1/2"), (r"\frac{2}{4}", "1/2"), (r"50\%", "1/2"), ("8,000", "8000"),
     (r" \left( 1, 2 \right) ", "( 1, 2 )")],
)  # fmt: skip
def test_canonical_form(answer, canonical):
    assert verify_math(box(answer), "7").extracted == canonical


def test_equivalence_is_symmetric_on_all_pairs():
    texts = [text for pair in EQUAL + DIFFERENT for text in pair][::3]
    for a in texts:
        assert equivalent(a, a)
        for b in texts[::5]:
            assert equivalent(a, b) is equivalent(b, a), (a, b)


PIECES = r"""
\frac{ \sqrt{ } ( ) [ ] \{ \} , ; = < > \le \cup \pm ^ _ % \% \text{ \in \infty
\begin{pmatrix} \end{pmatrix} & \\ \boxed{ \left \right $ ! \circ 1,000 0.5
0 1 23 x y e i pi cm and
"""
ANSWERS = st.lists(st.sampled_from([*PIECES.split(), " "]), max_size=12).map("".join)


@settings(max_examples=100, deadline=None)
@given(ANSWERS, st.sampled_from(["5", "x<3", r"\{1,2\}"]))
def test_never_raises_on_model_text(answer, gold):
    verdict = verify_math(box(answer), gold)
    assert verdict.correct is (verdict.reason == "equal")


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_never_raises_on_any_text(text):
    assert not verify_math(text, "5").correct or "5" in text
    verify_math(rf"\boxed{{{text}}}", "5")


@settings(max_examples=200, deadline=None)
@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_are_equal_only_to_themselves(a, b):
    written = rf"\frac{{{a.numerator}}}{{{a.denominator}}}"
    assert verify_math(box(written), f"{b.numerator}/{b.denominator}").correct is (a == b)


def test_workers_score_math():
    prompt = Prompt(id="p", index=0, question="q", token_ids=(), answer=r"\frac12")
    with make_verifier(["math"], workers=1, timeout_s=60) as verifier:
        verifier.submit(0, prompt, r"<think>a</think>\boxed{0.5}", (), False)
        verifier.submit(1, prompt, r"\boxed{0.6}", (), False)
        verdicts = {}
        while verifier.num_pending:
            verdicts.update(verifier.poll(10))
    assert (verdicts[0].reward, verdicts[0].solved, verdicts[0].extracted) == (1.0, True, "1/2")
    assert (verdicts[1].reward, verdicts[1].extracted) == (0.0, "3/5")


def test_module_is_importable_beside_the_standard_library():
    # A file named math.py must never be taken for the standard library's.
    assert Path(math.__spec__.origin or "built-in").parent.name != "rewards"

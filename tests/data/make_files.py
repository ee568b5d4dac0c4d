"""Writes the small data sets of this folder: rows of our own in the layouts of public data sets.

python tests/data/make_files.py
"""

import base64
import json
import pickle
import zlib
from pathlib import Path

import pyarrow
import pyarrow.parquet

HERE = Path(__file__).parent

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{}\n\nRemember to put your answer on its own line after "Answer:".'
)
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO_PROMPT.format(problem), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }
    for problem, answer, index in [
        ("How many integers $n$ satisfy $n^2 < 50$?", "15", "a1"),
        ("What is the sum of the first ten odd numbers?", "100", "b2"),
        ("How many integers $n$ satisfy $n^2 < 50$?", "15", "a1"),
    ]
]
MATH = [
    {
        "problem": "Find the positive root of $x^2 = \\frac{9}{16}$.",
        "level": "Level 2",
        "type": "Algebra",
        "solution": "The root is $x = \\boxed{\\frac{3}{4}}$.",
    },
    {
        "problem": "What percent of 40 is 10?",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": "It is $\\frac{10}{40} = \\boxed{25\\%}$.",
    },
]
MATH_500 = [
    {
        "problem": "Write $(x+1)^2 - 1$ as a product.",
        "solution": "It is $\\boxed{x(x+2)}$.",
        "answer": "x(x+2)",
        "subject": "Algebra",
        "level": 3,
        "unique_id": "test/algebra/1.json",
    }
]
GSM8K = [
    {
        "question": "Ada has 1,200 beads and buys 34 more. How many has she?",
        "answer": "She has 1200 + 34 = <<1200+34=1234>>1234 beads.\n#### 1,234",
    }
]
AIME_2024 = [
    {
        "id": 60,
        "problem": "Let $a$ be the least positive multiple of 7 above 200. Find $a$.",
        "solution": "It is \\boxed{203}.",
        "answer": "203",
        "url": "https://example.org/aime",
        "year": "2024",
    },
    {
        "id": 61,
        "problem": "Find the remainder of $2^{10}$ by $1000$.",
        "solution": "It is \\boxed{024}.",
        "answer": "024",
        "url": "https://example.org/aime",
        "year": "2024",
    },
]
HMMT = [
    {
        "problem_idx": 1,
        "problem": "Compute the sum of the roots and their product for $x^2 - 2x - 1$.",
        "answer": "1+\\sqrt{2}, 1-\\sqrt{2}",
        "problem_type": ["Algebra"],
    },
    {
        "problem_idx": 2,
        "problem": "How many orders of 26 cards are there, times $2^{25}$?",
        "answer": "2^{25} \\cdot 26!",
        "problem_type": ["Combinatorics"],
    },
]
BRUMO = [
    {
        "problem_idx": 1,
        "problem": "Compute $3^5 + 1$.",
        "answer": "244",
        "problem_type": ["Number Theory"],
    }
]
CODEFORCES = [
    {
        "id": "9999/A",
        "aliases": None,
        "contest_id": "9999",
        "contest_name": "Made Up Round",
        "index": "A",
        "time_limit": 2.0,
        "memory_limit": 256.0,
        "title": "A. Sum",
        "description": "Add two numbers.",
        "input_format": "Two integers.",
        "output_format": "Their sum.",
        "interaction_format": None,
        "note": None,
        "examples": [{"input": "1 2", "output": "3"}],
        "rating": 800,
        "tags": ["math"],
        "official_tests": [
            {"input": "1 2\n", "output": "3\n"},
            {"input": "-5 5\n", "output": "0\n"},
        ],
        "official_tests_complete": True,
        "input_mode": "stdio",
        "generated_checker": None,
        "executable": True,
        "generated_tests": 0,
    }
]


def encode(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


LIVE_CODE_BENCH = [
    {
        "question_title": "Double",
        "question_content": "Print twice the number.",
        "platform": "atcoder",
        "question_id": "abc999_a",
        "contest_id": "abc999",
        "contest_date": "2025-01-01T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "2", "output": "4", "testtype": "stdin"}]),
        "private_test_cases": encode([{"input": "-3", "output": "-6", "testtype": "stdin"}]),
        "metadata": "{}",
    },
    {
        "question_title": "Total",
        "question_content": "Return the sum of a list and a number.",
        "platform": "leetcode",
        "question_id": "9999",
        "contest_id": "weekly-contest-999",
        "contest_date": "2025-01-01T00:00:00",
        "starter_code": (
            "class Solution:\n    def total(self, values: List[int], extra: int) -> int:\n        "
        ),
        "difficulty": "easy",
        "public_test_cases": json.dumps(
            [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
        ),
        "private_test_cases": encode([{"input": "[]\n0", "output": "0", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "total"}),
    },
]
HUMAN_EVAL = [
    {
        "task_id": "HumanEval/999",
        "prompt": 'def double(x: int) -> int:\n    """Twice x."""\n',
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n"
        "    assert candidate(-1) == -2\n",
        "entry_point": "double",
    }
]
LINES = {
    "math": MATH,
    "math_500": MATH_500,
    "gsm8k": GSM8K,
    "aime_2024": AIME_2024,
    "hmmt": HMMT,
    "brumo": BRUMO,
    "codeforces": CODEFORCES,
    "livecodebench": LIVE_CODE_BENCH,
    "humaneval": HUMAN_EVAL,
}

if __name__ == "__main__":
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(DAPO), HERE / "dapo_math_17k.parquet")
    for name, rows in LINES.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (HERE / f"{name}.jsonl").write_text(text, encoding="utf-8")

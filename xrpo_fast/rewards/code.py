"""Code rewards: a completion's program against the tests of its problem, in a sandbox.

Expected outputs never enter the sandbox that holds the model's code: it is given inputs and its
outputs are compared outside, or by a judge in a sandbox of its own.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from xrpo_fast.rewards.code_tests import CodeTests, outputs_match, values_match
from xrpo_fast.rewards.extract import visible_text
from xrpo_fast.rewards.program import Limits
from xrpo_fast.rewards.sandbox import Sandbox

_PYTHON_NAMES = ("", "python", "python3", "py")
MAX_CODE_CHARS = 100_000
_INTERPRETER_MIB = 256

# What contest sites import before a solution.
_PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *; from collections import *; from functools import *; from heapq import *
from itertools import *; from math import *; from typing import *
"""
_SERVE = """
import ast, json, os, sys
folder, function, style = os.path.dirname(os.path.abspath(__file__)), sys.argv[1], sys.argv[2]
replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
requests = os.fdopen(os.dup(0), encoding="utf-8")
names = {"__name__": "solution"}
for name in ("prelude.py", "solution.py"):
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        exec(compile(file.read(), name, "exec"), names)
if function in names:
    call = names[function]
else:
    call = getattr(names["Solution"](), function)
for line in requests:
    arguments, keywords = ast.literal_eval(line) if style == "repr" else (json.loads(line), {})
    value = call(*arguments, **keywords)
    text = repr(value) if style == "repr" else json.dumps(value)
    replies.write(text.replace("\\n", " ") + "\\n")
    replies.flush()
"""
_JUDGE = """
import ast, os, sys
requests = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
def candidate(*arguments, **keywords):
    requests.write(repr((arguments, keywords)) + "\\n")
    requests.flush()
    return ast.literal_eval(sys.stdin.readline())
names = {"__name__": "check"}
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "check.py")) as file:
    exec(compile(file.read(), "check.py", "exec"), names)
names["check"](candidate)
"""


@dataclass(kw_only=True, frozen=True, slots=True)
class CodePolicy:
    """Limits and scoring of code tests."""

    scoring: Literal["all", "fraction"] = "all"
    """all: 1 where every test passes, else 0; fraction: share of tests that pass."""
    test_timeout_s: float = 6.0
    """Wall clock of one test; a problem's own limit, times time_scale, holds where it is lower."""
    time_scale: float = 2.0
    """A problem's own limit is meant for an idle judge without a sandbox to start."""
    sample_timeout_s: float = 60.0
    """Wall clock of all tests of a completion; tests left then have failed."""
    memory_mib: int = 1024
    """Address space of a program; a problem's own limit holds where it is lower, but not below
    256 MiB, which the interpreter needs."""
    output_mib: int = 16
    """Standard output of one test."""
    file_mib: int = 64
    """/tmp of a program."""
    max_tests: int | None = None
    """Only the first so many tests of a problem."""
    use_bubblewrap: bool | None = None
    """None: where it works, else plain limits with a warning; True: only with it."""


@dataclass(kw_only=True, frozen=True, slots=True)
class CodeVerdict:
    """Result of all tests of a completion."""

    reward: float | None
    """None where the problem cannot be judged here."""
    num_passed: int
    num_tests: int
    reason: str
    """passed, no_code, unsupported, or of the first failure: wrong, failed, timeout,
    output_limit."""


class CodeVerifier:
    """Runs the tests of code problems; makes and probes its sandbox once.

    Raises:
        SandboxError: programs cannot be run on this machine.
    """

    def __init__(self, policy: CodePolicy | None = None) -> None:
        self.policy = policy or CodePolicy()
        self.sandbox = Sandbox(use_bubblewrap=self.policy.use_bubblewrap)

    def verify(self, completion: str, tests: CodeTests) -> CodeVerdict:
        """Verdict on a completion; never raises on model text.

        Raises:
            SandboxError: the sandbox failed, which says nothing about the program.
        """
        num_tests = 1 if tests.kind == "check" else len(tests.inputs[: self.policy.max_tests])
        if not tests.is_supported:
            return CodeVerdict(reward=None, num_passed=0, num_tests=num_tests, reason="unsupported")
        code = extract_code(completion)
        if code is None:
            return CodeVerdict(reward=0.0, num_passed=0, num_tests=num_tests, reason="no_code")
        outcomes: list[str] = []
        for outcome in self._outcomes(code, tests, num_tests):
            outcomes.append(outcome)
            if outcome != "passed" and self.policy.scoring == "all":
                break
        num_passed = outcomes.count("passed")
        has_all = num_passed == num_tests
        fraction = num_passed / num_tests
        return CodeVerdict(
            reward=fraction if self.policy.scoring == "fraction" else float(has_all),
            num_passed=num_passed,
            num_tests=num_tests,
            reason="passed" if has_all else next(o for o in outcomes if o != "passed"),
        )

    def _outcomes(self, code: str, tests: CodeTests, num_tests: int) -> Iterator[str]:
        """What became of each test, until the sample's time is over."""
        limits = self._limits(tests)
        deadline_s = time.monotonic() + self.policy.sample_timeout_s
        if tests.kind == "check":
            limit_s = min(self.policy.sample_timeout_s, 4 * limits.timeout_s)
            yield self._check(code, tests, replace(limits, timeout_s=limit_s))
        elif tests.kind == "call":
            yield from self._calls(code, tests, num_tests, limits, deadline_s)
        else:
            for number in range(num_tests):
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    yield "timeout"
                    return
                bounded = replace(limits, timeout_s=min(limits.timeout_s, remaining_s))
                yield self._stdin(code, tests, number, bounded)

    def _limits(self, tests: CodeTests) -> Limits:
        policy = self.policy
        own_timeout_s = policy.time_scale * (tests.time_limit_s or math.inf)
        own_memory_mib = max(_INTERPRETER_MIB, int(tests.memory_limit_mib or policy.memory_mib))
        return Limits(
            timeout_s=min(policy.test_timeout_s, own_timeout_s),
            memory_mib=min(policy.memory_mib, own_memory_mib),
            output_bytes=policy.output_mib << 20,
            file_mib=policy.file_mib,
        )

    def _stdin(self, code: str, tests: CodeTests, number: int, limits: Limits) -> str:
        given, expected = tests.inputs[number], tests.expected[number]
        result = self.sandbox.run(code, stdin=given.encode(), limits=limits)
        if result.status != "ok":
            return result.status
        output = result.output.decode(errors="replace")
        if outputs_match(output, expected):
            return "passed"
        if tests.checker and self._checker_accepts(tests.checker, given, expected, output):
            return "passed"
        return "wrong"

    def _checker_accepts(self, checker: str, given: str, expected: str, output: str) -> bool:
        """A special judge, called as checker.py INPUT EXPECTED OUTPUT; it prints 0 or 1."""
        prefix = "/program/" if self.sandbox.is_isolated else ""
        result = self.sandbox.run(
            checker,
            limits=Limits(timeout_s=self.policy.test_timeout_s),
            files={"input.txt": given, "expected.txt": expected, "output.txt": output},
            arguments=[f"{prefix}{name}.txt" for name in ("input", "expected", "output")],
        )
        tokens = result.output.split()
        return result.status == "ok" and tokens[-1:] in ([b"1"], [b"1.0"], [b"True"])

    def _calls(
        self, code: str, tests: CodeTests, num_tests: int, limits: Limits, deadline_s: float
    ) -> Iterator[str]:
        """All calls in one program, one reply per line; the time limit is per reply."""
        requests = "".join(json.dumps(i) + "\n" for i in tests.inputs[:num_tests])
        sample_s = max(0.0, deadline_s - time.monotonic())
        result = self.sandbox.run(
            _SERVE,
            stdin=requests.encode(),
            limits=limits,
            files={"solution.py": code, "prelude.py": _PRELUDE},
            arguments=[tests.function, "json"],
            counts_lines=True,
            total_timeout_s=sample_s,
        )
        replies = result.output.decode(errors="replace").split("\n")[:-1]
        for number in range(num_tests):
            if number >= len(replies):
                yield result.status if result.status != "ok" else "failed"
                return
            try:
                is_right = values_match(json.loads(replies[number]), tests.expected[number])
            except (ValueError, RecursionError):
                is_right = False
            yield "passed" if is_right else "wrong"

    def _check(self, code: str, tests: CodeTests, limits: Limits) -> str:
        """check(candidate) in a judge of its own, whose calls go to the model's code by pipes."""
        to_candidate, to_judge = os.pipe(), os.pipe()
        ends = [os.fdopen(fd, mode) for fd, mode in
                zip((*to_candidate, *to_judge), ("rb", "wb") * 2, strict=True)]  # fmt: skip
        candidate_in, judge_out, judge_in, candidate_out = ends
        with (
            tempfile.TemporaryDirectory() as own_folder,
            tempfile.TemporaryDirectory() as judge_folder,
            self.sandbox.start(
                _SERVE,
                own_folder,
                stdin=candidate_in,
                stdout=candidate_out,
                limits=limits,
                files={"solution.py": code, "prelude.py": _PRELUDE},
                arguments=[tests.function, "repr"],
            ) as candidate,
            self.sandbox.start(
                _JUDGE,
                judge_folder,
                stdin=judge_in,
                stdout=judge_out,
                limits=limits,
                files={"check.py": tests.check_source},
            ) as judge,
        ):
            for end in ends:
                end.close()
            status = judge.wait(limits.timeout_s)
            judge.check_started()
            candidate.check_started()
        return "passed" if status == "ok" else status


def extract_code(completion: str) -> str | None:
    """The last closed Python code block after the thought; None if there is none or it is longer
    than 100,000 characters."""
    visible = visible_text(completion)
    if visible is None:
        return None
    code = None
    language: str | None = None
    lines: list[str] = []
    for line in visible.split("\n"):
        mark = line.strip()
        if mark.startswith("```"):
            if mark == "```" and language is not None:
                code = "\n".join(lines) + "\n" if language in _PYTHON_NAMES else code
                language = None
            else:
                language, lines = mark[3:].strip().lower(), []
        elif language is not None:
            lines.append(line)
    return code if code is not None and len(code) <= MAX_CODE_CHARS else None

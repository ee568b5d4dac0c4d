"""Test cases of code problems, from the layouts that data sets use, and how outputs compare."""

import base64
import io
import json
import pickle
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeGuard

FLOAT_TOLERANCE = 1e-6
"""Absolute and relative, of tokens that the expected output writes with a point or exponent."""


class TestCaseError(ValueError):
    """Test cases are malformed; found when data is loaded."""

    __test__ = False


@dataclass(kw_only=True, frozen=True, slots=True)
class CodeTests:
    """Tests of one problem.

    stdin: inputs and expected outputs as text. call: inputs are argument lists, expected outputs
    JSON values, of `function`. check: `check_source` defines check(candidate), which asserts.
    """

    kind: Literal["stdin", "call", "check"]
    inputs: list[Any] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)
    function: str = ""
    check_source: str = ""
    checker: str = ""
    """Python of a special judge, for problems with several right outputs."""
    time_limit_s: float | None = None
    memory_limit_mib: float | None = None
    is_supported: bool = True
    """False where the problem reads or writes files: not applicable."""


def parse_tests(answer: Any) -> CodeTests:
    """Tests from the gold answer of a code problem.

    Understands the layouts made by xrpo_fast.layouts (LiveCodeBench, open-r1 Codeforces,
    HumanEval), and as dictionary or JSON text {"inputs": [...], "outputs": [...], "fn_name": ...}
    or a list of {"input": ..., "output": ...}.

    Raises:
        TestCaseError: anything else, or no tests.
    """
    if isinstance(answer, str):
        answer = _json(answer, "answer")
    if isinstance(answer, list):
        return _from_pairs(answer)
    if not isinstance(answer, dict):
        raise TestCaseError(f"answer: expected test cases, got {type(answer).__name__}")
    try:
        if answer.get("layout") == "livecodebench":
            return _live_code_bench(answer)
        if answer.get("layout") == "codeforces":
            return _codeforces(answer)
        if answer.get("layout") == "humaneval":
            return _human_eval(answer)
        if "inputs" in answer and "outputs" in answer:
            return _from_columns(answer)
    except (KeyError, TypeError, AttributeError) as error:
        raise TestCaseError(
            f"answer: expected well-formed test cases, got {type(error).__name__}: {error}"
        ) from error
    raise TestCaseError(
        "answer: expected test cases with inputs and outputs, got the keys "
        f"{', '.join(sorted(map(str, answer)))}"
    )


def outputs_match(output: str, expected: str) -> bool:
    """Equal token by token; numbers that `expected` writes as decimals to 1e-6."""
    got_tokens, expected_tokens = output.split(), expected.split()
    return len(got_tokens) == len(expected_tokens) and all(
        got == wanted or _close(got, wanted)
        for got, wanted in zip(got_tokens, expected_tokens, strict=True)
    )


def values_match(value: Any, expected: Any) -> bool:
    """Equal JSON values; floats to 1e-6."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(values_match, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            values_match(value[key], expected[key]) for key in expected
        )
    if isinstance(value, float) or isinstance(expected, float):
        numbers = [float(v) for v in (value, expected) if _is_number(v)]
        return len(numbers) == 2 and _near(*numbers)
    return value == expected


def _close(got: str, wanted: str) -> bool:
    if not any(mark in wanted for mark in ".eE") or len(got) > 400:
        return False
    try:
        return _near(float(got), float(wanted))
    except ValueError:
        return False


def _near(got: float, wanted: float) -> bool:
    return got == wanted or abs(got - wanted) <= FLOAT_TOLERANCE * max(1.0, abs(wanted))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TestCaseError(f"{name}: expected JSON, got {text[:100]!r} ({error})") from error


def _from_pairs(pairs: list[Any], function: str = "", **limits: Any) -> CodeTests:
    """Tests as {"input": ..., "output": ...}; inputs of calls hold one JSON value per line."""
    if not pairs or not all(isinstance(p, dict) and {"input", "output"} <= p.keys() for p in pairs):
        raise TestCaseError(
            "answer: expected at least one test case with input and output, got "
            f"{str(pairs)[:100]!r}"
        )
    if not function:
        return CodeTests(
            kind="stdin",
            inputs=[str(pair["input"]) for pair in pairs],
            expected=[str(pair["output"]) for pair in pairs],
            **limits,
        )
    return CodeTests(
        kind="call",
        function=function,
        inputs=[[_json(ln, "input") for ln in str(p["input"]).split("\n")] for p in pairs],
        expected=[_json(str(pair["output"]), "output") for pair in pairs],
        **limits,
    )


def _from_columns(answer: dict[str, Any]) -> CodeTests:
    inputs, outputs = list(answer["inputs"]), list(answer["outputs"])
    if not inputs or len(inputs) != len(outputs):
        raise TestCaseError(
            "answer: expected as many outputs as inputs, at least one, got "
            f"{len(outputs)} and {len(inputs)}"
        )
    if function := answer.get("fn_name"):
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise TestCaseError("answer: expected inputs of calls to be lists of arguments")
        return CodeTests(kind="call", function=function, inputs=inputs, expected=outputs)
    as_text = ["\n".join(map(str, i)) if isinstance(i, list) else str(i) for i in inputs]
    wanted = ["\n".join(map(str, o)) if isinstance(o, list) else str(o) for o in outputs]
    return CodeTests(kind="stdin", inputs=as_text, expected=wanted)


def _live_code_bench(answer: dict[str, Any]) -> CodeTests:
    metadata = answer.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = _json(metadata, "metadata")
    pairs = _decode_tests(answer["public"]) + _decode_tests(answer["private"])
    return _from_pairs(pairs, metadata.get("func_name") or "")


def _decode_tests(tests: Any) -> list[Any]:
    """A list, its JSON, or LiveCodeBench's base64 of zlib of a pickled JSON text."""
    if isinstance(tests, list):
        return tests
    if not tests:
        return []
    return _decode_text(tests)


@lru_cache(maxsize=32)
def _decode_text(tests: str) -> list[Any]:
    if tests.lstrip().startswith("["):
        return _json(tests, "tests")
    try:
        text = _TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(tests)))).load()
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise TestCaseError(f"tests: expected encoded test cases, got {error}") from error
    return _json(text, "tests")


class _TextUnpickler(pickle.Unpickler):
    """Takes built-in values only: a data set must not run code here."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"test cases hold code: {module_name}.{global_name}")


def _codeforces(answer: dict[str, Any]) -> CodeTests:
    return _from_pairs(
        list(answer["tests"] or []),
        time_limit_s=_positive(answer.get("time_limit")),
        memory_limit_mib=_positive(answer.get("memory_limit")),
        checker=answer.get("checker") or "",
        is_supported=answer.get("input_mode") in (None, "", "stdio"),
    )


def _positive(value: Any) -> float | None:
    return float(value) if value else None


def _human_eval(answer: dict[str, Any]) -> CodeTests:
    source = f"{answer['prelude']}\n\n{answer['test']}\n"
    try:
        compile(source, "check", "exec")
    except (SyntaxError, ValueError) as error:
        raise TestCaseError(f"answer: expected tests in Python, got {error}") from error
    return CodeTests(kind="check", function=answer["entry_point"], check_source=source)

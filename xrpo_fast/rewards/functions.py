"""Reward functions by name, and what one of them says of one item.

Imported by the supervisor of the workers, so nothing heavy is imported before it is needed.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

BUILT_IN = ("math", "code", "exact", "builtin:symbols", "reasoning_gym")


class RewardContractError(ValueError):
    """A reward function broke its contract; the run must stop."""


@dataclass(slots=True, frozen=True)
class Score:
    """Reward of one function; None = not applicable. `extracted` = its canonical final answer."""

    reward: float | None
    extracted: str | None = None


_RETURN = "return a list with a number, or None for 'not applicable', for each completion"

Item = dict[str, Any]
"""question, prompt (text or messages), text, token_ids, answer, columns, is_truncated."""
Scorer = Callable[[Item], Score]
Policy = TypeVar("Policy")


def part_names(functions: list[str]) -> list[str]:
    """Short names for metrics: after the last colon, or the whole where that clashes."""
    short = [name.rpartition(":")[2] for name in functions]
    return [
        name if short.count(brief) > 1 else brief
        for name, brief in zip(functions, short, strict=True)
    ]


def load_scorer(name: str, options: dict[str, Any]) -> Scorer:
    """The function behind a name.

    Args:
        name: one of BUILT_IN, or "package.module:function".
        options: keyword arguments of the built-in functions, by name.
    Raises:
        ValueError: no such function, or its module cannot be imported.
    """
    if name in BUILT_IN:
        return _BUILT_IN_LOADERS[name](options.get(name, {}))
    return _user_scorer(name, load_function(name))


def load_function(name: str) -> Callable[..., Any]:
    """A callable by import path, "package.module:function"."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute or module_name == "builtin":
        raise ValueError(
            f"functions: expected one of {', '.join(BUILT_IN)} or 'package.module:function', "
            f"got {name!r}"
        )
    try:
        target: Any = import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except Exception as error:
        raise ValueError(
            f"functions: expected {name!r} to be importable, got {type(error).__name__}: {error}; "
            "the module must be on the Python path of the run"
        ) from error
    if not callable(target):
        raise ValueError(f"functions: expected {name!r} to be a function, got {type(target)}")
    return target


def answer_checker(
    functions: list[str], options: dict[str, dict[str, Any]] | None = None
) -> Callable[[Any], None]:
    """What raises ValueError for a gold answer that a built-in function could not use; given to
    load_prompts, so that a bad row is an error when data is loaded."""
    checks: list[Callable[[Any], Any]] = []
    if "math" in functions:
        from xrpo_fast.rewards.math import MathPolicy, parse_gold

        policy = make_policy(MathPolicy, "math", (options or {}).get("math", {}))
        checks.append(lambda answer: parse_gold(answer, policy=policy))
    if "code" in functions:
        from xrpo_fast.rewards.code_tests import parse_tests

        checks.append(parse_tests)
    if "exact" in functions:
        checks.append(_check_exact)

    def check(answer: Any) -> None:
        for check_one in checks:
            check_one(answer)

    return check


def _check_exact(answer: Any) -> None:
    if answer is None or not str(answer).strip():
        raise ValueError(f"answer: expected text, got {answer!r}")


def make_policy(policy_class: type[Policy], function: str, options: dict[str, Any]) -> Policy:
    """The policy of a built-in function from its options.

    Raises:
        ValueError: an unknown key, or a value that is none of the named ones.
    """
    hints = get_type_hints(policy_class)
    if unknown := set(options) - set(hints):
        raise ValueError(
            f"options.{function}: expected keys among {', '.join(sorted(hints))}, got "
            f"{', '.join(sorted(unknown))}"
        )
    for key, value in options.items():
        named = get_args(hints[key]) if get_origin(hints[key]) is Literal else (value,)
        if value not in named:
            raise ValueError(
                f"options.{function}.{key}: expected one of {', '.join(map(str, named))}, got "
                f"{value!r}"
            )
    return policy_class(**options)


def check_options(options: dict[str, dict[str, Any]]) -> None:
    """Raises ValueError for an option that a function does not have, before any worker starts."""
    for function, given in options.items():
        if function == "math":
            from xrpo_fast.rewards.math import MathPolicy

            make_policy(MathPolicy, function, given)
        elif function == "code":
            from xrpo_fast.rewards.code import CodePolicy

            make_policy(CodePolicy, function, given)
        else:
            _refuse_options(function, given)


class ItemScorer:
    """All functions of a run on one item, as a JSON-able dict.

    `parts`: reward by short name, None = not applicable; `extracted`; `error`: a function raised;
    `contract`: it broke its contract.
    """

    def __init__(self, functions: list[str], options: dict[str, Any]) -> None:
        scorers = [load_scorer(name, options) for name in functions]
        self._scorers = list(zip(functions, part_names(functions), scorers, strict=True))

    def warm_up(self) -> None:
        """Seconds of work that forked workers then share; needs no item."""
        if any(function == "math" for function, _, _ in self._scorers):
            from xrpo_fast.rewards.math import warm_up

            warm_up()

    def __call__(self, item: Item) -> dict[str, Any]:
        result: dict[str, Any] = {"parts": {}, "extracted": None, "error": None, "contract": None}
        for function, part, scorer in self._scorers:
            try:
                score = scorer(item)
            except RewardContractError as error:
                result["contract"] = str(error)
                break
            # Whatever the function raises is its failure, reported and counted by the caller.
            except Exception as error:
                result["error"] = f"{function}: {type(error).__name__}: {error}"[:2000]
                break
            result["parts"][part] = score.reward
            if result["extracted"] is None:
                result["extracted"] = score.extracted
        return result


def _user_scorer(name: str, function: Callable[..., Any]) -> Scorer:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def score(item: Item) -> Score:
        is_chat = isinstance(item["prompt"], list)
        completion = [{"role": "assistant", "content": item["text"]}] if is_chat else item["text"]
        columns = {
            **item["columns"],
            "answer": item["answer"],
            "completion_ids": list(item["token_ids"]),
            "is_truncated": item["is_truncated"],
        }
        keywords = {
            column: [value]
            for column, value in columns.items()
            if takes_all or column in parameters
        }
        keywords.update(prompts=[item["prompt"]], completions=[completion])
        return Score(_checked(name, function(**keywords)))

    return score


def _checked(name: str, values: Any) -> float | None:
    """The one value that a reward function returned for one completion."""
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise RewardContractError(
            f"reward.functions: {name}: expected a list with one reward per completion, got "
            f"{type(values).__name__}; {_RETURN}"
        )
    if len(values) != 1:
        raise RewardContractError(
            f"reward.functions: {name}: expected one reward per completion, got {len(values)} for "
            f"1 completion; {_RETURN}"
        )
    value = values[0]
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        reward = float(value)
    except (TypeError, ValueError):
        raise RewardContractError(
            f"reward.functions: {name}: expected rewards to be numbers or None, got {value!r}; "
            f"{_RETURN}"
        ) from None
    if math.isinf(reward):
        raise RewardContractError(
            f"reward.functions: {name}: expected finite rewards or NaN, got {reward}; {_RETURN}"
        )
    return None if math.isnan(reward) else reward


def _refuse_options(function: str, options: dict[str, Any]) -> None:
    if options:
        raise ValueError(f"options.{function}: expected none, got {', '.join(sorted(options))}")


def _load_exact(options: dict[str, Any]) -> Scorer:
    from xrpo_fast.rewards.exact import extract_exact, verify_exact

    return lambda item: Score(
        float(verify_exact(item["text"], item["answer"])),
        extract_exact(item["text"]),
    )


def _load_symbols(options: dict[str, Any]) -> Scorer:
    from xrpo_fast.tasks import symbols

    return lambda item: Score(
        float(symbols.verify(item["text"], item["answer"])), symbols.extract(item["text"])
    )


def _load_math(options: dict[str, Any]) -> Scorer:
    from xrpo_fast.rewards.math import MathPolicy, verify_math

    policy = make_policy(MathPolicy, "math", options)

    def score(item: Item) -> Score:
        verdict = verify_math(item["text"], item["answer"], policy=policy)
        return Score(float(verdict.correct), verdict.extracted)

    return score


def _load_code(options: dict[str, Any]) -> Scorer:
    from xrpo_fast.rewards.code import CodePolicy, CodeVerifier
    from xrpo_fast.rewards.code_tests import parse_tests

    verifier = CodeVerifier(make_policy(CodePolicy, "code", options))
    return lambda item: Score(verifier.verify(item["text"], parse_tests(item["answer"])).reward)


def _load_reasoning_gym(options: dict[str, Any]) -> Scorer:
    from xrpo_fast.rewards.gym import ReasoningGymScorer

    return ReasoningGymScorer()


_BUILT_IN_LOADERS: dict[str, Callable[[dict[str, Any]], Scorer]] = {
    "math": _load_math,
    "code": _load_code,
    "exact": _load_exact,
    "builtin:symbols": _load_symbols,
    "reasoning_gym": _load_reasoning_gym,
}

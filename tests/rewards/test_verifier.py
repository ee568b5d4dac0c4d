import logging
import math
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from xrpo_fast.rewards import RewardContractError, answer_checker, make_verifier
from xrpo_fast.rewards.functions import part_names
from xrpo_fast.rewards.wire import child_pids
from xrpo_fast.tasks import symbols
from xrpo_fast.types import Prompt


def make_prompt(**fields):
    defaults = {"id": "p", "index": 0, "question": "q", "token_ids": (1,), "answer": "blue"}
    return Prompt(**{**defaults, **fields})


def score_all(verifier, texts, prompt=None):
    """Verdicts in the order of the texts."""
    for key, text in enumerate(texts):
        verifier.submit(key, prompt or make_prompt(), text, (1, 2, 3), False)
    verdicts = {}
    while verifier.num_pending:
        verdicts.update(verifier.poll(10.0))
    return [verdicts[key] for key in range(len(texts))]


@pytest.fixture(autouse=True)
def user_functions_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(params=[0, 2], ids=["inline", "workers"])
def num_workers(request):
    return request.param


def test_exact_reward(num_workers):
    with make_verifier(["exact"], workers=num_workers) as verifier:
        right, wrong, empty = score_all(verifier, ["blue", "red", ""])
    assert (right.reward, right.solved, right.extracted, right.error) == (1.0, True, "blue", None)
    assert (wrong.reward, wrong.solved, wrong.parts) == (0.0, False, {"exact": 0.0})
    assert empty.reward == 0.0
    assert verifier.error_frac == 0


def test_weighted_sum_of_applicable_parts(num_workers):
    functions = ["exact", "reward_functions:never_applies", "reward_functions:length_reward"]
    with make_verifier(
        functions, weights=[2.0, 5.0, 0.5], full_reward=4.0, workers=num_workers
    ) as verifier:
        (verdict,) = score_all(verifier, ["blue"])
    assert verdict.parts == {"exact": 1.0, "length_reward": 4.0}
    assert verdict.reward == 4.0
    assert verdict.solved


@pytest.mark.parametrize("function", ["never_applies", "nan_reward"])
def test_not_applicable_is_nan_and_no_error(function):
    with make_verifier([f"reward_functions:{function}"]) as verifier:
        (verdict,) = score_all(verifier, ["text"])
    assert math.isnan(verdict.reward)
    assert not verdict.solved
    assert verdict.error is None
    assert verifier.error_frac == 0


def test_user_function_sees_columns_as_in_trl():
    prompt = make_prompt(columns={"tier": "easy", "unused": object})
    with make_verifier(["reward_functions:column_reward"], full_reward=0.25) as verifier:
        (verdict,) = score_all(verifier, ["text"], prompt)
    assert verdict.reward == 0.25
    assert verdict.solved


def test_rewards_see_the_think_tag_that_the_prompt_ends_in():  # TRL#6966, verifiers#213
    functions = ["exact", "reward_functions:think_format_reward"]
    with make_verifier(functions) as verifier:
        verifier.is_think_prefilled = True
        ended, unfinished = score_all(verifier, ["hm</think>blue", r"\boxed{blue}"])
    assert ended.parts == {"exact": 1.0, "think_format_reward": 1.0}
    assert unfinished.parts == {"exact": 0.0, "think_format_reward": 0.0}


def test_chat_prompt_makes_the_completion_a_message():
    prompt = make_prompt(messages=[{"role": "user", "content": "say hello"}])
    with make_verifier(["reward_functions:chat_reward"]) as verifier:
        assert [v.reward for v in score_all(verifier, ["hello", "bye"], prompt)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_many", "too_many: expected one reward per completion, got 2.*; return a list with a"),
        ("not_a_list", "not_a_list: expected a list with one reward per completion, got float"),
        ("text_reward", "text_reward: expected rewards to be numbers or None, got '1.0'"),
        ("infinite_reward", "infinite_reward: expected finite rewards or NaN, got inf"),
    ],
)
def test_broken_contract_stops_the_run(function, message, num_workers):
    with (
        make_verifier([f"reward_functions:{function}"], workers=num_workers) as verifier,
        pytest.raises(RewardContractError, match=f"^reward.functions: .*{message}"),
    ):
        score_all(verifier, ["text"])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", r"functions: expected one of math, code.* got 'maths'"),
        ("no_such_module:f", "expected 'no_such_module:f' to be importable.*ModuleNotFoundError"),
        ("reward_functions:no", "expected 'reward_functions:no' to be importable.*AttributeError"),
        ("reward_functions:os", "expected 'reward_functions:os' to be a function"),
    ],
)
def test_unknown_function(name, message, workers):
    with pytest.raises(ValueError, match=message):
        make_verifier([name], workers=workers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"functions": []}, "functions: expected at least one"),
        ({"functions": ["exact", "exact"]}, "none twice"),
        ({"functions": ["exact"], "weights": [1.0, 2.0]}, "weights: expected 1 finite"),
        ({"functions": ["exact"], "weights": [math.inf]}, "weights: expected 1 finite"),
        ({"functions": ["math"]}, r"workers: expected >= 1 for \['math'\], got 0"),
        ({"functions": ["exact"], "workers": -1}, "workers: expected >= 0, got -1"),
        ({"functions": ["exact"], "timeout_s": 0}, "timeout_s, max_error_frac: expected > 0"),
        ({"functions": ["exact"], "options": {"math": {}}}, "options: expected names among"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_verifier(**arguments)


def test_answer_checker_finds_what_no_reward_could_use():
    check = answer_checker(["math", "exact", "reward_functions:obey"])
    check("5")
    with pytest.raises(ValueError, match="expected a number, an expression in LaTeX"):
        check(r"\frac{")
    with pytest.raises(ValueError, match="answer: expected text, got ' '"):
        answer_checker(["exact"])(" ")
    answer_checker(["reward_functions:obey"])(None)


def test_builtin_task_needs_the_end_symbol():
    record = symbols.load()[0]
    prompt = make_prompt(question=record["question"], answer=record["answer"])
    gold = symbols.World(0).gold(record["question"])
    with make_verifier(["builtin:symbols"]) as verifier:
        right, unfinished = score_all(verifier, [gold, gold.removesuffix("$")], prompt)
    assert (right.reward, right.extracted, right.parts) == (1.0, record["answer"], {"symbols": 1.0})
    assert (unfinished.reward, unfinished.extracted) == (0.0, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_fromat": "any"}, r"options.math: expected keys among answer_format, .* got ans"),
        ({"answer_format": "box"}, r"options.math.answer_format: expected one of boxed, .*'box'"),
    ],
)
def test_unknown_options_of_a_function(options, message):
    with pytest.raises(ValueError, match=message):
        answer_checker(["math"], {"math": options})
    with pytest.raises(ValueError, match=message):
        make_verifier(["math"], workers=1, options={"math": options})


def test_part_names_are_short_and_unique():
    assert part_names(["math", "a.b:f", "builtin:symbols"]) == ["math", "f", "symbols"]
    assert part_names(["a:f", "b:f"]) == ["a:f", "b:f"]


@pytest.mark.parametrize("command", ["hang", "spin", "ignore"])
def test_hung_worker_is_an_error_and_is_replaced(command):
    with make_verifier(
        ["reward_functions:obey"], workers=1, timeout_s=0.3, max_error_frac=1.0
    ) as verifier:
        before, hung, after = score_all(verifier, ["fine", command, "fine"])
        assert (before.reward, after.reward) == (1.0, 1.0)
        assert math.isnan(hung.reward)
        assert hung.error == "passed its time limit of 0.3 s"
        assert verifier.num_errors == 1


@pytest.mark.parametrize(
    ("command", "error"),
    [("die", "exited with code 3"), ("kill", "killed by SIGKILL"), ("raise", "boom")],
)
def test_dead_worker_is_an_error_and_is_replaced(command, error):
    with make_verifier(["reward_functions:obey"], workers=1, max_error_frac=1.0) as verifier:
        before, dead, after = score_all(verifier, ["fine", command, "fine"])
        assert (before.reward, after.reward) == (1.0, 1.0)
        assert math.isnan(dead.reward)
        assert error in dead.error


def test_supervisor_killed_by_a_function_is_restarted():
    with make_verifier(["reward_functions:obey"], workers=1, max_error_frac=1.0) as verifier:
        (verdict,) = score_all(verifier, ["kill_parent"])
        assert "supervisor of the reward workers was killed by SIGKILL" in verdict.error
        assert score_all(verifier, ["fine"])[0].reward == 1.0


def test_error_share_stops_the_run():
    with (
        make_verifier(["reward_functions:obey"], max_error_frac=0.5) as verifier,
        pytest.raises(RuntimeError, match=r"at most 50.0% .*got 100.0%.*obey: RuntimeError: boom"),
    ):
        score_all(verifier, ["raise"] * 20)


def test_errors_that_chance_explains_do_not_stop_the_run():
    with make_verifier(["reward_functions:obey"], max_error_frac=0.05) as verifier:
        score_all(verifier, (["raise"] * 2 + ["fine"] * 38) * 25)
        assert verifier.num_errors == 50


def test_an_error_share_above_the_limit_stops_the_run_in_time():
    with (
        make_verifier(["reward_functions:obey"], max_error_frac=0.05) as verifier,
        pytest.raises(RuntimeError, match=r"at most 5.0% .*got 1\d\.\d%"),
    ):
        score_all(verifier, (["raise"] + ["fine"] * 7) * 50)


def test_error_share_waits_for_enough_items(caplog):
    with (
        caplog.at_level(logging.WARNING),
        make_verifier(["reward_functions:obey"], max_error_frac=0.5) as verifier,
    ):
        score_all(verifier, ["raise"] * 19)
        assert verifier.error_frac == 1.0
    assert len(caplog.records) == 1


def test_results_stream_back_as_they_finish():
    with make_verifier(["reward_functions:obey"], workers=2) as verifier:
        verifier.submit(7, make_prompt(), "sleep 2", (), False)
        verifier.submit(8, make_prompt(), "fine", (), False)
        assert [key for key, _ in verifier.poll(10.0)] == [8]
        assert verifier.num_pending == 1
        assert verifier.poll() == []
        assert [key for key, _ in verifier.poll(10.0)] == [7]


def test_workers_go_on_while_nobody_polls():
    with make_verifier(["reward_functions:obey"], workers=2) as verifier:
        for key in range(20):
            verifier.submit(key, make_prompt(), "sleep 0.01", (), False)
        time.sleep(3)
        assert len(verifier.poll()) == 20


def test_megabyte_completions_do_not_deadlock():
    text = "x" * (1 << 20)
    with make_verifier(["exact", "reward_functions:length_reward"], workers=2) as verifier:
        verdicts = score_all(verifier, [text] * 30)
    assert {verdict.parts["length_reward"] for verdict in verdicts} == {float(1 << 20)}


def test_grandchildren_die_with_their_worker(tmp_path):
    pid_file = tmp_path / "pid"
    with make_verifier(
        ["reward_functions:obey"], workers=1, timeout_s=2.0, max_error_frac=1.0
    ) as verifier:
        (verdict,) = score_all(verifier, [f"daemon {pid_file}"])
        assert "time limit" in verdict.error
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


def test_files_of_a_dead_worker_are_removed(tmp_path):
    note = tmp_path / "note"
    with make_verifier(["reward_functions:obey"], workers=1, max_error_frac=1.0) as verifier:
        score_all(verifier, [f"litter {note}"])
        assert not os.path.exists(note.read_text())


def test_close_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = set(child_pids(os.getpid()))
    verifier = make_verifier(["reward_functions:obey"], workers=2)
    verifier.submit(0, make_prompt(), "ignore", (), False)
    (supervisor,) = set(child_pids(os.getpid())) - before
    while len(workers := child_pids(supervisor)) < 2:
        time.sleep(0.01)
    verifier.close()
    verifier.close()
    for pid in [supervisor, *workers]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ten_thousand_items_with_hangs_and_deaths(tmp_path, monkeypatch):
    """1 % hang (limit 1 s), 1 % kill their worker, 2 workers: everything comes back."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    texts = ([r"so \boxed{5}"] * 49 + [r"\boxed{\sqrt{26}}"] * 49 + ["hang", "kill"]) * 100
    functions = ["exact", "math", "reward_functions:obey"]
    prompt = make_prompt(answer="5")
    start_s = time.monotonic()
    with make_verifier(functions, workers=2, timeout_s=1.0) as verifier:
        verdicts = score_all(verifier, texts, prompt)
        wall_s = time.monotonic() - start_s
        kinds = Counter(v.error or f"reward {v.reward:g}" for v in verdicts)
        (supervisor,) = child_pids(os.getpid())
        assert len(child_pids(supervisor)) == 2
    print(f"10,000 items in {wall_s:.1f} s")
    assert kinds == {
        "reward 3": 4900,
        "reward 1": 4900,
        "passed its time limit of 1 s": 100,
        "worker killed by SIGKILL": 100,
    }
    assert list(tmp_path.iterdir()) == []

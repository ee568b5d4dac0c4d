import base64
import errno
import json
import logging
import os
import pickle
import platform
import subprocess
import tempfile
import zlib
from pathlib import Path

import pytest

from xrpo_fast.rewards import answer_checker, make_verifier
from xrpo_fast.rewards.code import CodePolicy, CodeVerifier, extract_code
from xrpo_fast.rewards.code_tests import (
    TestCaseError,
    outputs_match,
    parse_tests,
    values_match,
)
from xrpo_fast.rewards.program import Limits, SandboxError
from xrpo_fast.rewards.sandbox import NOBODY, Sandbox
from xrpo_fast.rewards.wire import child_pids
from xrpo_fast.types import Prompt

ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD_CALL = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
ADD_CHECK = {
    "layout": "humaneval",
    "prelude": "def shift(x):\n    return x\n\ndef add(a, b):\n    'Sum.'\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    "
    "assert candidate((1,), (2,)) == shift((1, 2))\n",
    "entry_point": "add",
}
SOLVE_ADD = "a, b = map(int, input().split())\nprint(a + b)\n"


def fenced(code):
    return f"<think>hm</think>Here:\n```python\n{code}\n```\n"


@pytest.fixture(scope="module", params=["bubblewrap", "limits"])
def sandbox(request, require):
    if request.param == "bubblewrap":
        require("bubblewrap")
    return Sandbox(use_bubblewrap=request.param == "bubblewrap")


@pytest.fixture(scope="module")
def verifier():
    return CodeVerifier(CodePolicy(test_timeout_s=5.0))


def run(sandbox, source, **limits):
    return sandbox.run(source, limits=Limits(**{"timeout_s": 10.0, "memory_mib": 256, **limits}))


def test_program_sees_input_and_gives_output(sandbox):
    result = sandbox.run(SOLVE_ADD, stdin=b"20 22\n", limits=Limits(timeout_s=10.0))
    assert (result.status, result.output) == ("ok", b"42\n")


HOSTILE = {
    "fork": "import os\nwhile True:\n    os.fork()",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/ls'])",
    "allocate": "x = bytearray(100 << 30)",
    "append": "x = []\nwhile True:\n    x.append('a' * (1 << 20))",
    "kill_parent": "import os\nos.kill(os.getppid(), 9)",
    "kill_all": "import os\nos.kill(-1, 9)",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=1)",
    "write_10_gb": "with open('big', 'wb') as f:\n    for _ in range(10240):\n"
    "        f.write(bytes(1 << 20))",
    "recursion": "def f():\n    return f()\nf()",
    "abort": "import os\nos.abort()",
    "raise_signal": "import signal\nsignal.raise_signal(signal.SIGTERM)",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "exit": "raise SystemExit(3)",
    "syntax": "def",
    "raise": "1 / 0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_fails_and_leaves_nothing(sandbox, name):
    before = set(child_pids(os.getpid()))
    assert run(sandbox, HOSTILE[name]).status == "failed"
    assert set(child_pids(os.getpid())) == before


@pytest.fixture
def neighbour():
    """A process of the user that programs run as."""
    user = NOBODY if os.getuid() == 0 else None
    with subprocess.Popen(["sleep", "60"], user=user) as process:
        yield process
        process.kill()


SIGNAL_CALLS = {
    "kill": (62, 129, "pid, 9"),
    "tkill": (200, 130, "pid, 9"),
    "tgkill": (234, 131, "pid, pid, 9"),
    "rt_sigqueueinfo": (129, 138, "pid, 9, queued"),
    "rt_tgsigqueueinfo": (297, 240, "pid, pid, 9, queued"),
}
"""Number on x86-64 and on aarch64, and arguments that kill `pid`."""


@pytest.mark.parametrize("name", SIGNAL_CALLS)
def test_a_program_cannot_signal_others_of_its_user(sandbox, neighbour, name):
    *numbers, arguments = SIGNAL_CALLS[name]
    number = numbers[["x86_64", "aarch64"].index(platform.machine())]
    source = (
        "import ctypes, struct\n"
        f"pid = {neighbour.pid}\n"
        # siginfo_t with si_code = SI_QUEUE, as sigqueue sends it.
        "queued = struct.pack('iii116x', 9, 0, -1)\n"
        f"ctypes.CDLL(None, use_errno=True).syscall({number}, {arguments})\n"
        "print(ctypes.get_errno())\n"
    )
    assert run(sandbox, source).output == f"{errno.EPERM}\n".encode()
    assert neighbour.poll() is None


# {pid} is the other process; the last would kill it once something is written to the pipe.
MEDDLING = {
    "limits": "resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
    "affinity": "os.sched_setaffinity({pid}, {{0}})",
    "scheduler": "os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
    "owner of a file": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {pid})",
    "signal of a file": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, 9)",
}


@pytest.mark.parametrize("name", MEDDLING)
def test_a_program_cannot_meddle_with_others_of_its_user(sandbox, neighbour, name):
    statement = MEDDLING[name].format(pid=neighbour.pid)
    source = (
        "import fcntl, os, resource\n"
        f"try:\n    {statement}\n    print('done')\n"
        "except PermissionError:\n    print('refused')\n"
    )
    assert run(sandbox, source).output == b"refused\n"
    assert neighbour.poll() is None


def test_a_program_may_change_what_is_its_own(sandbox):
    source = (
        "import fcntl, os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "os.sched_setaffinity(0, os.sched_getaffinity(0))\n"
        "reader = os.pipe()[0]\n"
        "fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK)\n"
        "print(fcntl.fcntl(reader, fcntl.F_GETFL) & os.O_NONBLOCK == os.O_NONBLOCK)\n"
    )
    assert run(sandbox, source).output == b"True\n"


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    pass",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(100)",
        "import os, time\nos.close(1)\ntime.sleep(100)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()",
    ],
    ids=["spin", "ignore_sigterm", "close_output", "thread"],
)
def test_time_limit(sandbox, source):
    assert run(sandbox, source, timeout_s=1.0).status == "timeout"


def test_output_limit(sandbox):
    result = run(sandbox, "while True:\n    print('x' * 1000)", output_bytes=100_000)
    assert (result.status, len(result.output)) == ("output_limit", 100_000)


def test_environment_is_not_passed_on(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    result = run(sandbox, "import os\nprint(dict(os.environ))")
    assert result.status == "ok"
    assert b"hunter2" not in result.output


def test_threads_are_allowed(sandbox):
    source = "import threading as t\nx = t.Thread(target=print, args=('hi',))\nx.start()\nx.join()"
    assert run(sandbox, source).output == b"hi\n"


@pytest.mark.parametrize(
    "source",
    [
        "print(open('/etc/passwd').read())",
        "open('/dev/shm/x', 'w')",
        "open('/usr/x', 'w')",
        "open('/program/main.py', 'w')",
        f"print(open({str(Path(__file__).resolve())!r}).read())",
        "for i in range(100):\n    open(f'/tmp/{i}', 'wb').write(bytes(10 << 20))",
    ],
    ids=["passwd", "shared_memory", "usr", "own_source", "host_file", "many_files"],
)
def test_bubblewrap_hides_the_host(source, require):
    require("bubblewrap")
    assert run(Sandbox(), source).status == "failed"


def test_fallback_says_what_is_not_contained(caplog):
    with caplog.at_level(logging.WARNING):
        assert not Sandbox(use_bubblewrap=False).is_isolated
    assert "not contained are: reading the host's files" in caplog.text


def test_bubblewrap_that_does_not_start_is_an_error(tmp_path, monkeypatch, require):
    require("bubblewrap")
    sandbox = Sandbox()
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="expected bubblewrap to work, it does not"):
        Sandbox(use_bubblewrap=True)
    monkeypatch.setattr(sandbox, "_bwrap", str(broken))
    with pytest.raises(SandboxError, match="bubblewrap could not start a program"):
        run(sandbox, "print(1)")


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (ADD, SOLVE_ADD),
        (json.dumps(ADD), SOLVE_ADD),
        ([{"input": "1 2", "output": "3"}], SOLVE_ADD),
        (ADD_CALL, "def add(a, b):\n    print('noise')\n    return a + b"),
        (ADD_CALL, "class Solution:\n    def add(self, a: List[int], b):\n        return a + b"),
        (ADD_CHECK, "def add(a, b):\n    print('noise')\n    return a + b"),
    ],
    ids=["stdin", "json", "pairs", "call", "method", "check"],
)
def test_right_program(verifier, answer, code):
    verdict = verifier.verify(fenced(code), parse_tests(answer))
    assert (verdict.reward, verdict.reason) == (1.0, "passed")


@pytest.mark.parametrize(
    ("answer", "code", "reason"),
    [
        (ADD, "print(3)", "wrong"),
        (ADD, "print(", "failed"),
        (ADD, "", "wrong"),
        (ADD_CALL, "def add(a, b):\n    return 3", "wrong"),
        (ADD_CALL, "def add(a, b):\n    return {1, 2}", "failed"),
        (ADD_CALL, "def add(a, b):\n    raise ValueError", "failed"),
        (ADD_CALL, "def other(a, b):\n    return a + b", "failed"),
        (ADD_CALL, "import os\ndef add(a, b):\n    os._exit(0)", "failed"),
        (ADD_CALL, "import os\nos.write(1, b'3\\n7\\n')\nos._exit(1)", "failed"),
        (ADD_CHECK, "def add(a, b):\n    return 3", "failed"),
        (ADD_CHECK, "import os\nos._exit(0)", "failed"),
        (ADD_CHECK, "def add(a, b):\n    while True:\n        pass", "timeout"),
    ],
)
def test_wrong_program(answer, code, reason):
    verifier = CodeVerifier(CodePolicy(test_timeout_s=1.0))
    verdict = verifier.verify(fenced(code), parse_tests(answer))
    assert verdict.reward == 0.0
    assert verdict.reason == reason


def test_expected_outputs_are_not_in_the_sandbox(verifier):
    # Without bubblewrap the host's files are not hidden, as the warning says.
    folders = ("/program", "/tmp", ".") if verifier.sandbox.is_isolated else (".",)
    spy = (
        "import gc, os, sys\nfound = []\n"
        f"for folder in {folders}:\n"
        "    for root, _, names in os.walk(folder):\n"
        "        for name in names:\n"
        "            try:\n"
        "                found.append(open(os.path.join(root, name)).read())\n"
        "            except Exception:\n"
        "                pass\n"
        "print('31337' in str(found) + str(sys.argv))\n"
    )
    tests = parse_tests({"inputs": ["x"], "outputs": ["31337"]})
    assert verifier.verify(fenced(spy), tests).reason == "wrong"
    if verifier.sandbox.is_isolated:
        result = run(verifier.sandbox, spy)
        assert result.output == b"True\n"  # only the spy's own source holds it


def test_fraction_scoring_goes_on_after_a_failure():
    half = "a, b = map(int, input().split())\nprint(3)"
    tests = parse_tests({"inputs": ["3 4", "1 2"], "outputs": ["7", "3"]})
    fraction = CodeVerifier(CodePolicy(scoring="fraction")).verify(fenced(half), tests)
    assert (fraction.reward, fraction.num_passed, fraction.reason) == (0.5, 1, "wrong")
    assert CodeVerifier(CodePolicy()).verify(fenced(half), tests).reward == 0.0


def test_sample_time_limit_covers_all_tests():
    tests = parse_tests({"inputs": ["x"] * 50, "outputs": [""] * 50})
    policy = CodePolicy(scoring="fraction", sample_timeout_s=1.5, test_timeout_s=1.0)
    verdict = CodeVerifier(policy).verify(fenced("import time\ntime.sleep(0.5)"), tests)
    assert verdict.reason == "timeout"
    assert verdict.num_passed < 4


def test_special_judge_accepts_another_right_output(verifier):
    checker = (
        "import sys\n"
        "given, _, output = (open(name).read().split() for name in sys.argv[1:])\n"
        "print(int(sorted(given) == sorted(output)))\n"
    )
    tests = parse_tests(
        {
            "layout": "codeforces",
            "tests": [{"input": "b a", "output": "a b"}],
            "checker": checker,
        }
    )
    assert verifier.verify(fenced("print(input())"), tests).reward == 1.0
    assert verifier.verify(fenced("print('a c')"), tests).reward == 0.0


def test_file_problems_are_not_applicable(verifier):
    tests = parse_tests(
        {"layout": "codeforces", "tests": [{"input": "", "output": ""}], "input_mode": "file"}
    )
    assert verifier.verify(fenced("print()"), tests).reward is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\ntext\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```cpp\nb\n```", "a\n"),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("<think>```python\na\n```", None),
        ("<think>```python\na\n```</think>", None),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\n" * 100_000, None),
        ("```python\n" + "a" * 200_000 + "\n```", None),
        ("no code", None),
    ],
    ids=str,
)
def test_extract_code(text, expected):
    assert extract_code(text) == expected


@pytest.mark.parametrize(
    ("output", "expected", "is_match"),
    [
        ("1 2\n", "1  2", True),
        ("1\n2", "1 2", True),
        ("1 2", "1 3", False),
        ("1", "1 2", False),
        ("0.3333333333", "0.333333", True),
        ("0.34", "0.33", False),
        ("1000000", "1000001", False),
        ("1e6", "1000000.0", True),
        ("YES", "yes", False),
        ("nan", "1.0", False),
        ("inf", "1.0", False),
        ("", "", True),
    ],
)
def test_outputs_match(output, expected, is_match):
    assert outputs_match(output, expected) is is_match


@pytest.mark.parametrize(
    ("value", "expected", "is_match"),
    [
        ([1, [2]], [1, [2]], True),
        ([1, 2], [1, 3], False),
        (0.1 + 0.2, 0.3, True),
        ({"a": 1.0}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (None, None, True),
        (None, 1.0, False),
    ],
)
def test_values_match(value, expected, is_match):
    assert values_match(value, expected) is is_match


def encode(tests):
    """As LiveCodeBench encodes its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def test_live_code_bench_tests_are_decoded():
    public = [{"input": "[1]\n2", "output": "3", "testtype": "functional"}]
    private = [{"input": "[3]\n4", "output": "7", "testtype": "functional"}]
    answer = {
        "layout": "livecodebench",
        "public": json.dumps(public),
        "private": encode(private),
        "metadata": json.dumps({"func_name": "add"}),
    }
    tests = parse_tests(answer)
    assert (tests.kind, tests.function) == ("call", "add")
    assert (tests.inputs, tests.expected) == ([[[1], 2], [[3], 4]], [3, 7])


class Evil:
    def __reduce__(self):
        return (os.system, ("true",))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "answer: expected test cases, got NoneType"),
        ("{", "answer: expected JSON, got '{'"),
        ([], "expected at least one test case with input and output"),
        ([{"input": "1"}], "expected at least one test case with input and output"),
        ({"inputs": ["1"], "outputs": []}, "expected as many outputs as inputs"),
        ({"inputs": [], "outputs": []}, "at least one, got 0 and 0"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}, "inputs of calls to be lists"),
        ({"tests": []}, "got the keys tests"),
        ({"layout": "livecodebench", "public": "[]"}, "well-formed test cases, got KeyError"),
        (
            {"layout": "livecodebench", "public": "", "private": "###"},
            "expected encoded test cases|expected JSON",
        ),
        (
            {
                "layout": "livecodebench",
                "public": "",
                "private": base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode(),
            },
            "test cases hold code",
        ),
        (
            {"layout": "humaneval", "prelude": "", "test": "def", "entry_point": "f"},
            "expected tests in Python",
        ),
    ],
)
def test_malformed_tests(answer, message):
    with pytest.raises(TestCaseError, match=message):
        parse_tests(answer)
    with pytest.raises(ValueError, match="expected"):
        answer_checker(["code"])(answer)


def test_a_closed_folder_for_temporary_files_is_an_error_and_no_wrong_answer(tmp_path, monkeypatch):
    sandbox = Sandbox(use_bubblewrap=False)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if os.getuid() != 0:
        assert run(sandbox, "print('as myself')").output == b"as myself\n"
    else:
        with pytest.raises(SandboxError, match="every user may enter"):
            run(sandbox, "print('nobody')")
        with pytest.raises(SandboxError, match=r"could not; .*every user may enter"):
            Sandbox(use_bubblewrap=False)


def test_workers_score_code():
    prompt = Prompt(id="p", index=0, question="q", token_ids=(), answer=ADD)
    texts = [fenced(SOLVE_ADD), fenced("print(3)"), fenced(HOSTILE["kill_parent"]), "no code"]
    with make_verifier(["code"], workers=2, timeout_s=20) as verifier:
        for key, text in enumerate(texts):
            verifier.submit(key, prompt, text, (), False)
        verdicts = {}
        while verifier.num_pending:
            verdicts.update(verifier.poll(10))
    assert [verdicts[key].reward for key in range(4)] == [1.0, 0.0, 0.0, 0.0]
    assert verifier.num_errors == 0

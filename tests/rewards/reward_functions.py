"""User reward functions for the tests of the verifier; imported by its worker processes."""

import os
import signal
import subprocess
import sys
import time


def length_reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def gold_reward(prompts, completions, answer, **columns):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def chat_reward(prompts, completions, **kwargs):
    return [
        float(prompt[-1]["role"] == "user" and completion[0]["content"] == "hello")
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def column_reward(completions, completion_ids, tier, is_truncated, **kwargs):
    assert completion_ids == [[1, 2, 3]]
    assert is_truncated == [False]
    return [{"easy": 0.25}[name] for name in tier]


def think_format_reward(completions, **kwargs):
    return [
        float(text.startswith("<think>") and text.count("</think>") == 1) for text in completions
    ]


def never_applies(completions, **kwargs):
    return [None for _ in completions]


def nan_reward(completions, **kwargs):
    return [float("nan")]


def too_many(completions, **kwargs):
    return [1.0, 1.0]


def not_a_list(completions, **kwargs):
    return 1.0


def text_reward(completions, **kwargs):
    return ["1.0"]


def infinite_reward(completions, **kwargs):
    return [float("inf")]


def obey(completions, **kwargs):
    """Do what the completion says."""
    command, _, argument = completions[0].partition(" ")
    if command == "hang":
        time.sleep(3600)
    elif command == "spin":
        while True:
            pass
    elif command == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    elif command == "die":
        os._exit(3)
    elif command == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif command == "kill_parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)
    elif command == "raise":
        raise RuntimeError("boom")
    elif command == "sleep":
        time.sleep(float(argument))
    elif command == "daemon":
        # A grandchild in its own session: killing the worker's process group does not reach it.
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
        )
        with open(argument, "w") as file:
            file.write(str(child.pid))
        time.sleep(3600)
    elif command == "litter":
        import tempfile

        descriptor, path = tempfile.mkstemp()
        os.close(descriptor)
        with open(argument, "w") as file:
            file.write(path)
        os._exit(1)
    return [1.0]

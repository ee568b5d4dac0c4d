"""What a child process asks of the kernel: die with the parent, adopt orphans, stay in bounds."""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Be killed when the parent thread ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that it can be reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def lower_limit(which: int, value: int) -> None:
    """Lower a resource limit for good; a limit that is lower already stays."""
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def describe_exit(wait_status: int) -> str:
    """How a process ended, in words, from a status of waitpid."""
    code = os.waitstatus_to_exitcode(wait_status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

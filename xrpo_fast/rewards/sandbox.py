"""Runs untrusted Python: bounded, without network, environment or the host's files.

With bubblewrap the program sees the interpreter, a small /tmp of its own and nothing else; its
processes live in their own namespaces. Without it the same limits and the same system-call filter
hold, but files are not hidden: a warning says so.
"""

import logging
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from xrpo_fast.rewards import seccomp
from xrpo_fast.rewards.process import die_with_parent, lower_limit
from xrpo_fast.rewards.program import Limits, Program, RunResult, SandboxError

logger = logging.getLogger(__name__)

NOBODY = 65534
_MIB = 1 << 20
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/sbin")


class Sandbox:
    """How programs are run on this machine; probed once when made.

    Args:
        use_bubblewrap: None = where it works; False leaves it out.
    Raises:
        SandboxError: nothing on this machine can contain a program.
    """

    def __init__(self, *, use_bubblewrap: bool | None = None) -> None:
        self._python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        self._filter = seccomp.filter_program()
        self._bwrap = shutil.which("bwrap") if use_bubblewrap is not False else None
        self._failure = ""
        if self._bwrap is None or not self._works():
            if use_bubblewrap:
                raise SandboxError("sandbox: expected bubblewrap to work, it does not")
            self._bwrap = None
            self._warn_of_fallback()
            if not self._works() and not self._works_with("/usr/bin/python3"):
                raise SandboxError(
                    "sandbox: expected to run a program, could not; install bubblewrap, or run as "
                    f"a normal user whose Python others may execute{self._failure}"
                )

    @property
    def is_isolated(self) -> bool:
        """Whether the host's files are hidden."""
        return self._bwrap is not None

    def run(
        self,
        source: str,
        *,
        stdin: bytes = b"",
        limits: Limits,
        files: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
        counts_lines: bool = False,
        total_timeout_s: float = math.inf,
    ) -> RunResult:
        """Run a Python program to its end.

        Args:
            files: name -> content of further files beside the program.
            counts_lines: the time limit is per line of output.
            total_timeout_s: wall clock of the whole run all the same.
        Raises:
            SandboxError: the program could not be started.
        """
        with tempfile.TemporaryDirectory(prefix="code-") as folder, tempfile.TemporaryFile() as in_:
            in_.write(stdin)
            in_.seek(0)
            with self.start(
                source, folder, stdin=in_, stdout=subprocess.PIPE, limits=limits,
                files=files, arguments=arguments,
            ) as program:  # fmt: skip
                status, output = program.read(limits, counts_lines, total_timeout_s)
                if status == "ok":
                    status = program.wait(limits.timeout_s)
                program.check_started()
        return RunResult(status=status, output=output)

    def start(
        self,
        source: str,
        folder: str,
        *,
        stdin: IO[bytes],
        stdout: int | IO[bytes],
        limits: Limits,
        files: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> "Program":
        """A running program; `folder` must outlive it. Leaving the context kills it."""
        for name, content in {"main.py": source, **(files or {})}.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace") as file:
                file.write(content)
        os.chmod(folder, 0o755)
        is_dropped = self._bwrap is None and os.getuid() == 0
        if is_dropped:
            _check_reachable(folder)
            os.chown(folder, NOBODY, NOBODY)
        if self._bwrap is None:
            command = [self._python, "-I", "-S", "-B", f"{folder}/main.py", *arguments]
            passed: list[int] = []
            status_reader = None
        else:
            status_reader, status_writer = os.pipe()
            filter_fd = self._filter_file()
            passed = [status_writer, *([] if filter_fd is None else [filter_fd])]
            command = self._bubblewrap(folder, limits, status_writer, filter_fd)
            command += [self._python, "-I", "-S", "-B", "/program/main.py", *arguments]
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                start_new_session=True,
                pass_fds=passed,
                preexec_fn=self._restrict(limits),
                user=NOBODY if is_dropped else None,
                group=NOBODY if is_dropped else None,
                extra_groups=[] if is_dropped else None,
            )
        except (OSError, subprocess.SubprocessError) as error:
            if status_reader is not None:
                os.close(status_reader)
            raise SandboxError(f"sandbox: a program could not be started: {error}") from error
        finally:
            for descriptor in passed:
                os.close(descriptor)
        return Program(process, status_reader)

    def _filter_file(self) -> int | None:
        """Descriptor of the system-call filter, for bubblewrap to read."""
        if self._filter is None:
            return None
        descriptor = os.memfd_create("filter", 0)
        os.write(descriptor, self._filter)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def _bubblewrap(
        self, folder: str, limits: Limits, status_fd: int, filter_fd: int | None
    ) -> list[str]:
        assert self._bwrap is not None
        command = [self._bwrap, "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid",
                   str(NOBODY), "--die-with-parent", "--new-session", "--cap-drop", "ALL",
                   "--hostname", "sandbox", "--json-status-fd", str(status_fd)]  # fmt: skip
        for system_folder in _SYSTEM_FOLDERS:
            if os.path.islink(system_folder):
                command += ["--symlink", os.readlink(system_folder), system_folder]
            elif os.path.isdir(system_folder):
                command += ["--ro-bind", system_folder, system_folder]
        prefix = os.path.realpath(sys.base_prefix)
        if not prefix.startswith("/usr"):
            command += ["--ro-bind", prefix, prefix]
        command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        command += ["--size", str(limits.file_mib * _MIB), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        command += ["--ro-bind", folder, "/program", "--remount-ro", "/"]
        if filter_fd is not None:
            command += ["--seccomp", str(filter_fd)]
        return [*command, "--"]

    def _restrict(self, limits: Limits) -> Callable[[], None]:
        is_filtered_here = self._bwrap is None and self._filter is not None

        def restrict() -> None:
            die_with_parent()
            lower_limit(resource.RLIMIT_CORE, 0)
            lower_limit(resource.RLIMIT_AS, limits.memory_mib * _MIB)
            lower_limit(resource.RLIMIT_FSIZE, limits.file_mib * _MIB)
            lower_limit(resource.RLIMIT_NOFILE, 64)
            if is_filtered_here:
                assert self._filter is not None
                seccomp.install(self._filter)

        return restrict

    def _works(self) -> bool:
        try:
            result = self.run("print('works')", limits=Limits(timeout_s=20.0))
        except SandboxError as error:
            self._failure = f" ({error})"
            return False
        return result == RunResult(status="ok", output=b"works\n")

    def _works_with(self, python: str) -> bool:
        """Another interpreter: that of a virtual environment in root's home is closed to nobody."""
        self._python = python
        return os.path.exists(python) and self._works()

    def _warn_of_fallback(self) -> None:
        missing = ["reading the host's files", "writing files that this user may write"]
        if self._filter is None:
            missing += ["network", "starting and killing processes"]
        if os.getuid() == 0:
            missing[1] = "writing files that everyone may write"
        logger.warning(
            "code rewards run without bubblewrap (not installed, or namespaces are not allowed): "
            "time, memory, output and file sizes are limited, but not contained are: %s; install "
            "bubblewrap for untrusted models",
            ", ".join(missing),
        )


def _check_reachable(folder: str) -> None:
    """Raises SandboxError where another user cannot get to a folder: the program would fail to
    start, and its author would be blamed."""
    parent = os.path.dirname(os.path.realpath(folder))
    while parent != os.path.dirname(parent):
        if not os.stat(parent).st_mode & 0o001:
            raise SandboxError(
                f"sandbox: expected a folder for temporary files that every user may enter, as "
                f"programs run as nobody, got {parent}; set TMPDIR, or install bubblewrap"
            )
        parent = os.path.dirname(parent)

"""A system-call filter for code under test: one process, no sockets, no signals to others, nor
changes of their limits or their share of the processor.

A filter cannot tell others from the process itself, which loses signals to itself too: abort() then
ends it by an instruction that traps instead.

Threads stay possible. It holds with and without bubblewrap, also for root, whom a limit on the
number of processes does not bind.
"""

import ctypes
import errno
import platform
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS: dict[str, dict[str, int]] = {
    "x86_64": {
        "fork": 57, "vfork": 58, "socket": 41, "socketpair": 53, "kill": 62, "tkill": 200,
        "ptrace": 101, "process_vm_writev": 311, "process_vm_readv": 310, "setpriority": 141,
        "pidfd_open": 434, "pidfd_send_signal": 424, "io_uring_setup": 425, "unshare": 272,
        "mount": 165, "setns": 308, "keyctl": 250, "add_key": 248, "bpf": 321, "tgkill": 234,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
    },
    "aarch64": {
        "socket": 198, "socketpair": 199, "kill": 129, "tkill": 130, "ptrace": 117,
        "process_vm_writev": 271, "process_vm_readv": 270, "setpriority": 140,
        "pidfd_open": 434, "pidfd_send_signal": 424, "io_uring_setup": 425, "unshare": 97,
        "mount": 40, "setns": 268, "keyctl": 219, "add_key": 217, "bpf": 280, "tgkill": 131,
        "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
    },
}  # fmt: skip
_OF_ITSELF: dict[str, dict[str, int]] = {
    "x86_64": {
        "prlimit64": 302, "sched_setparam": 142, "sched_setscheduler": 144,
        "sched_setaffinity": 203, "sched_setattr": 314,
    },
    "aarch64": {
        "prlimit64": 261, "sched_setparam": 118, "sched_setscheduler": 119,
        "sched_setaffinity": 122, "sched_setattr": 274,
    },
}  # fmt: skip
"""Calls whose first argument is a process: 0, the caller, is the only one allowed."""
_FCNTL = {"x86_64": 72, "aarch64": 25}
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
"""With these a file sends signals, such as SIGKILL, to any process of the user."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_CLONE_THREAD = 0x00010000
_FIRST_X32_CALL = 0x40000000

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_CALL, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT, _OFFSET_SECOND_ARGUMENT = 0, 4, 16, 24

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def filter_program() -> bytes | None:
    """The filter as classic BPF for this machine; None where its call numbers are not known."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        return None
    refuse = _ERRNO | errno.EPERM
    program = [
        _instruction(_LOAD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _OFFSET_CALL),
        _instruction(_JUMP_GREATER_EQUAL, _FIRST_X32_CALL, 0, 1),
        _instruction(_RETURN, _KILL),
        # The C library falls back to clone, whose flags a filter can read.
        _instruction(_JUMP_EQUAL, _CLONE3, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for number in _CALLS[machine].values():
        program += [
            _instruction(_JUMP_EQUAL, number, 0, 1),
            _instruction(_RETURN, refuse),
        ]
    for number in _OF_ITSELF[machine].values():
        program += [
            _instruction(_JUMP_EQUAL, number, 0, 4),
            _instruction(_LOAD, _OFFSET_FIRST_ARGUMENT),
            _instruction(_JUMP_EQUAL, 0, 0, 1),
            _instruction(_RETURN, _ALLOW),
            _instruction(_RETURN, refuse),
        ]
    program += [
        _instruction(_JUMP_EQUAL, _FCNTL[machine], 0, 6),
        _instruction(_LOAD, _OFFSET_SECOND_ARGUMENT),
        _instruction(_JUMP_EQUAL, _F_SETOWN, 3, 0),
        _instruction(_JUMP_EQUAL, _F_SETSIG, 2, 0),
        _instruction(_JUMP_EQUAL, _F_SETOWN_EX, 1, 0),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, refuse),
    ]
    program += [
        _instruction(_JUMP_EQUAL, _CLONE[machine], 0, 3),
        _instruction(_LOAD, _OFFSET_FIRST_ARGUMENT),
        _instruction(_JUMP_ANY_BIT, _CLONE_THREAD, 1, 0),
        _instruction(_RETURN, refuse),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def install(program: bytes) -> None:
    """Apply a filter to this process and all that it becomes.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a 16-bit length, padding, a pointer.
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    fprog = ctypes.create_string_buffer(header, len(header))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(fprog), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)

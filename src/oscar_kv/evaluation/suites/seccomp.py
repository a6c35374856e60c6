# SPDX-License-Identifier: Apache-2.0
"""The child's side of the sandbox: locks its own process in, then runs the program it is given on standard input.

Run as a script with ``-I -S``; it uses the standard library alone and imports nothing of this package. The parent
imports it for :func:`supported` and :func:`bpf`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import struct
import sys

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_*, linux/audit.h."""

# System call numbers (x86_64, aarch64); None where a processor has no such call. Sources: the kernel's
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "access": (21, None), "select": (23, None),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23), "nanosleep": (35, 101),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17), "readlink": (89, None),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72),
    "ppoll": (271, 73), "getrandom": (318, 278), "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
# Calls that may be made only without these bits in an argument: files are opened for reading alone.
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_WITHOUT_BITS = {"open": ((2, None), 1, _WRITING), "openat": ((257, 56), 2, _WRITING)}
# Calls that may be made only with one of these values: fcntl that asks about a descriptor or duplicates it.
_WITH_VALUE = {"fcntl": ((72, 25), 1, (1, 2, 3, 1030))}

_EPERM = 1
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def supported() -> str:
    """Why this machine has no sandbox; empty where it has one."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if platform.machine() not in _ARCH or sys.byteorder != "little" or struct.calcsize("P") != 8:
        return f"it needs 64-bit Python on x86_64 or aarch64, this is {platform.machine()}"
    return ""


def bpf(machine: str) -> bytes:
    """The filter for a processor, struct sock_filter[]: permits the lists above, refuses the rest with EPERM.

    Calls in another architecture's numbers (32-bit entry points) end the process.
    """
    which = list(_ARCH).index(machine)
    out: list[tuple[int, int, int, int]] = []

    def add(code: int, value: int, yes: int = 0, no: int = 0) -> None:
        out.append((code, yes, no, value))

    add(_LOAD, 4)  # seccomp_data.arch
    add(_EQUAL, _ARCH[machine], 1, 0)
    add(_RETURN, _KILL)
    add(_LOAD, 0)  # seccomp_data.nr
    if machine == "x86_64":  # the x32 interface has numbers of its own
        add(_AT_LEAST, 0x40000000, 0, 1)
        add(_RETURN, _KILL)
    for numbers in _ALLOWED.values():
        if (number := numbers[which]) is not None:
            add(_EQUAL, number, 0, 1)
            add(_RETURN, _ALLOW)
    for numbers, argument, bits in _WITHOUT_BITS.values():
        if (number := numbers[which]) is not None:
            add(_EQUAL, number, 0, 4)
            add(_LOAD, 16 + 8 * argument)  # the low half of the argument: flags are an int
            add(_ANY_BIT, bits, 1, 0)
            add(_RETURN, _ALLOW)
            add(_RETURN, _REFUSE)
    for numbers, argument, values in _WITH_VALUE.values():
        if (number := numbers[which]) is not None:
            add(_EQUAL, number, 0, 2 + 2 * len(values))
            add(_LOAD, 16 + 8 * argument)
            for value in values:
                add(_EQUAL, value, 0, 1)
                add(_RETURN, _ALLOW)
            add(_RETURN, _REFUSE)
    add(_RETURN, _REFUSE)
    return b"".join(struct.pack("<HBBI", code, yes, no, value) for code, yes, no, value in out)


def lock(cpu: int, memory: int) -> None:
    """Locks this process in, for good. OSError where the kernel refuses.

    cpu: seconds of processor time. memory: bytes of address space.
    """
    import resource  # no such module outside Unix, where this file is imported to say so

    libc = ctypes.CDLL(None, use_errno=True)
    # A second wall, where it can be had: no network, no shared memory of others (CLONE_NEWUSER, NEWNET, NEWIPC).
    libc.unshare(0x10000000 | 0x40000000 | 0x08000000)
    for what, limit in (
        (resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64),
    ):  # fmt: skip
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))
    program = bpf(platform.machine())
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        """struct sock_fprog."""

        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    wanted = Program(len(program) // 8, ctypes.addressof(code))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    for call in (
        (no_new_privileges, ctypes.c_ulong(1), ctypes.c_ulong(0)),
        (set_seccomp, ctypes.c_ulong(filter_mode), ctypes.byref(wanted)),
    ):
        if libc.prctl(call[0], call[1], call[2], ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl({call[0]}): {os.strerror(number)}")


def main() -> None:
    """Reads {token, program, cpu, memory} as JSON, answers {token, error} (or {locked: false, error})."""
    job = json.loads(sys.stdin.read())
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        code = compile(job["program"], "<program>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as problem:
        os.write(answer, json.dumps({"token": job["token"], "error": type(problem).__name__}).encode())
        return
    try:
        lock(job["cpu"], job["memory"])
    except OSError as problem:
        os.write(answer, json.dumps({"locked": False, "error": str(problem)}).encode())
        return
    token, error = job.pop("token"), ""
    try:
        exec(code, {"__name__": "program"})
    except BaseException as problem:  # SystemExit too: a program that ends itself has not passed
        error = type(problem).__name__
    with contextlib.suppress(OSError):
        os.write(answer, json.dumps({"token": token, "error": error}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Code that tries to do harm fails, and nothing outside notices."""

from __future__ import annotations

import os
import platform
import socket
import struct
import time
from pathlib import Path

import pytest

from oscar_kv.errors import OscarError
from oscar_kv.evaluation.suites import Sandbox, sandbox
from oscar_kv.evaluation.suites.seccomp import bpf, supported

locked = pytest.mark.skipif(bool(supported()), reason=f"no sandbox on this machine: {supported()}")
BOX = Sandbox(timeout=8.0, memory=1 << 28)
BRIEF = Sandbox(timeout=1.0, memory=1 << 28)
"""For programs that would run for ever."""


@locked
def test_a_right_program_passes_and_wrong_ones_do_not() -> None:
    good = "import math, re, hashlib, collections\nassert math.isqrt(81) == 9\nprint('noise')\n"
    assert BOX.run(good + "assert hashlib.md5(b'x').hexdigest()[:4] == '9dd4'").passed
    for program, error in [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("raise KeyError('x')", "KeyError"),
        ("def f():\n    f()\nf()", "RecursionError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import numpy", "ModuleNotFoundError"),
    ]:
        outcome = BOX.run(program)
        assert (outcome.passed, outcome.error) == (False, error)


@locked
@pytest.mark.parametrize(
    "escape",
    [
        "import os; os._exit(0)",
        'import os; [os.write(fd, b\'{"token": "", "error": ""}\') for fd in (1, 3, 4)]; os._exit(0)',
        "import os; os.abort()",
    ],
)
def test_ending_early_is_no_way_to_pass(escape: str) -> None:
    assert not BOX.run(escape).passed


@locked
def test_no_network() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        tries = f"import socket; socket.create_connection(('127.0.0.1', {port}), 0.5)"
        assert BOX.run(tries).error == "PermissionError"
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


@locked
def test_an_endless_loop_ends() -> None:
    begin = time.monotonic()
    for program in ("while True: pass", "import time\ntime.sleep(60)"):
        assert BRIEF.run(program).error == "timeout"
    assert time.monotonic() - begin < 6


@locked
def test_a_memory_hog_is_refused() -> None:
    assert BOX.run("x = bytearray(1 << 40)").error == "MemoryError"
    assert BOX.run("x = []\nwhile True: x.append(bytearray(1 << 20))").error == "MemoryError"


@locked
def test_no_file_is_written_removed_or_renamed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    name = repr(str(precious))
    for program in (
        f"open({name}, 'w')", f"open({name}, 'a')", f"open({name}, 'r+')", f"open({name} + '2', 'x')", "open('x', 'w')",
        f"import os; os.remove({name})", f"import os; os.rename({name}, {name} + '3')",
        f"import os; os.truncate({name}, 0)", f"import os; os.chmod({name}, 0)", f"import os; os.mkdir({name} + 'd')",
        f"import os; os.symlink('/', {name} + 'l')", f"import os; os.link({name}, {name} + 'h')",
    ):  # fmt: skip
        assert BOX.run(program).error == "PermissionError", program
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]
    assert precious.read_text() == "as it was"


@locked
def test_no_process_thread_or_signal() -> None:
    assert BOX.run("import os\nwhile True: os.fork()").error == "PermissionError"
    assert BOX.run("import subprocess; subprocess.run(['true'])").error == "PermissionError"
    assert BOX.run("import os; os.execv('/bin/true', ['true'])").error == "PermissionError"
    assert BOX.run("import threading; threading.Thread(target=print).start()").error == "RuntimeError"
    for target in ("os.getppid()", str(os.getpid()), "-1", "0"):
        assert BOX.run(f"import os, signal; os.kill({target}, signal.SIGKILL)").error == "PermissionError"
    # The same by system call, past Python's own functions, and through the parent's limits.
    assert BOX.run(f"import ctypes\nassert ctypes.CDLL(None).kill({os.getpid()}, 9) == -1").passed
    limits = f"import resource; resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1))"
    assert BOX.run(limits).error == "PermissionError"


@locked
def test_nothing_of_the_parents_environment_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_KV_SECRET", "s3cret")
    assert BOX.run("import os; assert 'OSCAR_KV_SECRET' not in os.environ and not os.listdir('.')").passed
    assert BOX.run("import sys; assert not any('site-packages' in p for p in sys.path)").passed


@locked
def test_floods_of_output_do_no_harm() -> None:
    assert BOX.run("for _ in range(2000): print('x' * 1000)").passed
    flood = "import os\nwhile True:\n    for fd in range(3, 8):\n        try: os.write(fd, b'x' * 65536)\n"
    assert not BRIEF.run(flood + "        except OSError: pass").passed


def test_without_a_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "supported", lambda: "it needs Linux")
    monkeypatch.setattr(sandbox.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(OscarError, match="not run without a sandbox.*needs Linux"):
        Sandbox().run("x = 1")


def test_limits_are_checked() -> None:
    with pytest.raises(OscarError, match="more than 0 s"):
        Sandbox(timeout=0)


def decide(machine: str, arch: int, number: int, *arguments: int) -> int:
    """What a filter returns for a call: seccomp's small virtual machine."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("<HBBI", bpf(machine)))
    at, value = 0, 0
    while True:
        operation, yes, no, k = code[at]
        at += 1
        if operation == 0x20:
            value = struct.unpack_from("<I", data, k)[0]
        elif operation == 0x06:
            return k
        else:
            at += yes if {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[operation] else no


@pytest.mark.parametrize(
    ("machine", "arch", "read", "openat", "fcntl", "refused"),
    [  # read, openat, fcntl; socket, clone, execve, kill, unlinkat, prlimit64, io_uring_setup, ptrace
        ("x86_64", 0xC000003E, 0, 257, 72, (41, 56, 59, 62, 263, 302, 425, 101)),
        ("aarch64", 0xC00000B7, 63, 56, 25, (198, 220, 221, 129, 35, 261, 425, 117)),
    ],
)
def test_the_filters_of_both_processors(
    machine: str, arch: int, read: int, openat: int, fcntl: int, refused: tuple[int, ...]
) -> None:
    allow, eperm, kill = 0x7FFF0000, 0x00050001, 0x80000000
    assert decide(machine, arch, read) == allow
    assert decide(machine, arch, openat, 0, 0, os.O_RDONLY | os.O_CLOEXEC) == allow
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC):
        assert decide(machine, arch, openat, 0, 0, flags) == eperm
    assert decide(machine, arch, fcntl, 0, 3) == allow
    assert decide(machine, arch, fcntl, 0, 8) == eperm  # F_SETOWN would let signals be sent
    for number in refused:
        assert decide(machine, arch, number) == eperm
    assert decide(machine, arch ^ 1, read) == kill
    if machine == "x86_64":
        assert decide(machine, arch, read | 0x40000000) == kill


def test_supported_names_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in supported() or "Linux" in supported()

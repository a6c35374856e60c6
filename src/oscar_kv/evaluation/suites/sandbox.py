# SPDX-License-Identifier: Apache-2.0
"""Runs code that a model wrote, so that it can compute and do nothing else.

The code runs in a Python of its own (``-I -S``: no environment, no site-packages) in an empty temporary folder, under a
list of permitted system calls (seccomp): memory, time, reading files. The kernel refuses everything else: sockets, new
processes and threads, signals, writing or removing any file. Limits on processor time, address space and file size hold
besides, the network namespace is an empty one where the kernel lets us make it, and the process group is killed at the
limit. Where the kernel or processor is none that we have a list for, nothing is run and the error says so.

What remains: the code can read what this user can read (it cannot send it anywhere), use one core until the limit, and,
if it searches the interpreter for it, find the token that says a program has passed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ...errors import OscarError
from .seccomp import supported

_REPLY = 4096
"""Bytes of the child's reply that are read."""


@dataclass(frozen=True)
class Outcome:
    """passed: the program ran to its end. error: "" or the exception's class, "timeout", or "killed" with the code."""

    passed: bool
    error: str
    seconds: float


@dataclass(frozen=True)
class Sandbox:
    """Limits: seconds of wall clock (processor time: as many, rounded up), bytes of address space."""

    timeout: float = 10.0
    memory: int = 1 << 30

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.memory < 1 << 27:
            raise OscarError(
                f"sandbox: timeout {self.timeout} s, memory {self.memory} bytes; use more than 0 s, at least 128 MiB"
            )

    def run(self, program: str) -> Outcome:
        """Runs the program to its end or its limit. OscarError where it cannot be locked in."""
        if reason := supported():
            raise OscarError(f"generated code is not run without a sandbox, and there is none here: {reason}")
        token = secrets.token_hex(16)
        job = {"token": token, "program": program, "cpu": int(self.timeout) + 1, "memory": self.memory}
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="oscar-kv-sandbox-") as folder, tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(job).encode())
            stdin.seek(0)
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("seccomp.py"))],
                stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, env={},
                start_new_session=True,
            )  # fmt: skip
            try:
                reply = _read(child, begin + self.timeout)
                late = _wait(child, begin + self.timeout)
            finally:
                _end(child)
        seconds = time.monotonic() - begin
        try:
            said = json.loads(reply)
        except ValueError:
            said = {}
        if not isinstance(said, dict):
            said = {}
        if said.get("locked") is False:
            raise OscarError(f"generated code is not run without a sandbox: {said.get('error')}")
        # The token is known to the child's own code alone: text the program writes cannot say that it passed.
        if said.get("token") == token:
            return Outcome(not said["error"], str(said["error"]), seconds)
        return Outcome(False, "timeout" if late else f"killed ({child.returncode})", seconds)


def _read(child: subprocess.Popen[bytes], deadline: float) -> bytes:
    """What the child says, up to a few kilobytes, its end, or the deadline."""
    assert child.stdout is not None
    got = b""
    while len(got) < _REPLY and (left := deadline - time.monotonic()) > 0:
        if not select.select([child.stdout], [], [], left)[0]:
            break
        part = os.read(child.stdout.fileno(), _REPLY - len(got))
        if not part:
            break
        got += part
    return got


def _wait(child: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether the deadline came before the child's end."""
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills the child's process group. Only before the child is reaped is its number certainly still its own."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.stdout is not None:
        child.stdout.close()

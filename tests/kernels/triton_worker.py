# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter in a process of its own: whether it is on must be known before Triton is first imported.

``run(name, *arguments, **options)`` calls a kernel of ``oscar_kv.kernels.triton.kernel_set()`` there. Tensors that it
writes are copied back into the caller's.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pickle
import subprocess
import sys
from functools import cache
from typing import Any

import torch

from oscar_kv.errors import OscarError

AVAILABLE = importlib.util.find_spec("triton") is not None


@cache
def _process() -> subprocess.Popen[bytes]:
    paths = [p for p in sys.path if p]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    worker = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    atexit.register(worker.kill)
    return worker


def run(name: str, *arguments: Any, **options: Any) -> Any:
    """The kernel's result; OscarError as the kernel raises it; RuntimeError for anything else that goes wrong."""
    tuning = options.pop("tuning", {})
    worker = _process()
    assert worker.stdin is not None
    assert worker.stdout is not None
    pickle.dump((name, tuning, arguments, options), worker.stdin)
    worker.stdin.flush()
    failed, result, after = pickle.load(worker.stdout)
    if failed == "OscarError":
        raise OscarError(result)
    if failed:
        raise RuntimeError(f"{failed}: {result}")
    for mine, theirs in zip(_tensors((arguments, options)), _tensors(after), strict=True):
        if not torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
            mine.copy_(theirs)
    return options["out"] if options.get("out") is not None else result


def _tensors(x: object) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        return [t for value in x.values() for t in _tensors(value)]
    if isinstance(x, tuple | list):
        return [t for value in x for t in _tensors(value)]
    return [t for value in vars(x).values() for t in _tensors(value)] if hasattr(x, "__dict__") else []


def _scalars_by_item() -> None:
    """NumPy 2.4 no longer converts arrays of one element with int(); Triton 3.6's interpreter counts on it in loops."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between the replies
    import numpy as np

    _scalars_by_item()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    from oscar_kv.kernels.triton.decode import TritonDecode
    from oscar_kv.kernels.triton.dequantise import TritonDequantise
    from oscar_kv.kernels.triton.store import TritonStore

    kernels = {"decode": TritonDecode, "store": TritonStore, "dequantise": TritonDequantise}
    while True:
        try:
            name, tuning, arguments, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = ("", kernels[name](**tuning)(*arguments, **options), (arguments, options))
        except Exception as error:
            reply = (type(error).__name__, str(error), None)
        pickle.dump(reply, replies)
        replies.flush()


if __name__ == "__main__":
    _serve()

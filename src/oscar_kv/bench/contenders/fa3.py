# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3: vLLM's extension (by path, or found in an installed vLLM), else the package flash_attn_interface.

vLLM's extension registers ``torch.ops._vllm_fa3_C``, whose ``fwd`` takes 37 positional arguments in vLLM 0.25.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ...errors import OscarError
from ..inputs import SPREAD, block_table, queries, sets_for
from ..reference import dense_reference, relative_error
from ..shapes import DecodeShape, Shape
from .base import FP8_LIMIT, Contender


class Way(NamedTuple):
    """A way to call it. plan: with the scheduler's metadata made beforehand, as vLLM does."""

    page: int
    ragged: bool
    plan: bool
    splits: int

    def __str__(self) -> str:
        words = [f"page {self.page}", "ragged" if self.ragged else "batched"]
        return ", ".join([*words, *(["planned"] if self.plan else []), f"splits {self.splits or 'its own'}"])


WAYS = (
    Way(64, True, True, 0), Way(64, False, False, 0), Way(64, False, False, 16), Way(128, True, True, 0),
    Way(128, False, False, 16),
)  # fmt: skip


def extension(given: str | None) -> Path | None:
    """vLLM's extension: the given file, or the one in an installed vLLM (whose import takes seconds: not imported)."""
    if given:
        return Path(given)
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [p for folder in folders for p in Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so")]
    return found[0] if found else None


def why_no_fa3(given: str | None) -> str | None:
    """Why FlashAttention-3 cannot be called here, or None."""
    if given and not Path(given).is_file():
        return f"--fa3 {given}: no such file"
    if extension(given) is None and importlib.util.find_spec("flash_attn_interface") is None:
        return "FlashAttention-3 is not installed (vllm, flash_attn_interface); --fa3 FILE names vLLM's extension"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return "FlashAttention-3 runs on compute capability 9.x alone"
    return None if torch.cuda.is_available() else "it needs a CUDA device"


def load(given: str | None) -> Any:
    """``torch.ops._vllm_fa3_C``, or None where the package flash_attn_interface stands in. Raises OscarError."""
    if (reason := why_no_fa3(given)) is not None:
        raise OscarError(reason)
    file = extension(given)
    if file is None:
        return None
    torch.ops.load_library(str(file))
    return torch.ops._vllm_fa3_C


def forward(
    ops: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, *, causal: bool = True, splits: int = 0,
    table: Tensor | None = None, used: Tensor | None = None, starts: Tensor | None = None,
    key_starts: Tensor | None = None, plan: Tensor | None = None, longest: tuple[int, int] | None = None,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One call of vLLM's extension: (out, log-sum-exp).

    starts, key_starts: offsets of ragged queries and keys, with longest: (queries, keys) of the longest request.
    """
    arguments: list[Any] = [q, k, v, None, None, None, out, starts, key_starts, None, None, used]
    arguments += [*(longest or (None, None)), table, *[None] * 5, *(scales or (None,) * 3)]
    arguments += [q.shape[-1] ** -0.5, causal, -1, -1, 0.0, True, plan, splits, None, 0, None, 1, 0, None]
    result = ops.fwd(*arguments)
    return result[0], result[1]


class DecodeBf16(Contender):
    """Decode over a paged cache [pages, page, kv_heads, d], the block table in random order."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def missing(self) -> str | None:
        return why_no_fa3(self.options.fa3)

    def ways(self, shape: Shape) -> list[str]:
        return [str(w) for w in WAYS]

    def bytes(self, shape: Shape) -> int:
        return cast(DecodeShape, shape).dense_bytes(self.dtype.itemsize)

    def prepare(self, shape: Shape) -> None:
        self.make_inputs(cast(DecodeShape, shape))
        self.ops = load(self.options.fa3)

    def make_inputs(self, s: DecodeShape) -> None:
        """Caches, queries, lengths and block tables."""
        self.shape = s
        padded = -(-s.context // 128) * 128
        size = (2, s.batch * padded, s.kv_heads, s.head_dim)
        sets = min(8, sets_for(self.bytes(s), self.options.device)) if s.batch < 8 else 2

        def made() -> Tensor:
            kv = torch.empty(size, dtype=self.dtype, device=self.options.device)
            for part in kv.flatten(0, 1).split(1 << 20):  # by parts: FP8 has no random numbers of its own
                part.copy_(torch.randn(part.shape, device=self.options.device, dtype=torch.bfloat16).mul_(SPREAD))
            return kv

        self.kv = [made() for _ in range(sets)]
        self.q = queries(s, s.batch, device=self.options.device).to(self.dtype)
        self.used = torch.full((s.batch,), s.context, dtype=torch.int32, device=self.options.device)
        self.tables = {page: block_table(s.batch, padded // page, self.options.device) for page in (64, 128)}
        # Their value is 1; what they cost is the same for others.
        self.scale = (
            None if self.dtype == torch.bfloat16 else torch.ones(s.batch, s.kv_heads, device=self.options.device)
        )

    def _call(self, way: Way, kv: Tensor) -> Callable[[], Tensor]:
        s, table = self.shape, self.tables[way.page]
        k, v = (x.view(-1, way.page, s.kv_heads, s.head_dim) for x in kv)
        scales = None if self.scale is None else (self.scale,) * 3
        longest = table.shape[1] * way.page
        if self.ops is None:
            from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

            names = ("q_descale", "k_descale", "v_descale")
            descale = dict(zip(names, scales, strict=True)) if scales else {}

            def packaged() -> Tensor:
                return flash_attn_with_kvcache(
                    self.q[:, None], k, v, cache_seqlens=self.used, page_table=table, causal=True,
                    num_splits=way.splits, **descale,
                )[:, 0]  # fmt: skip

            return packaged
        starts = torch.arange(s.batch + 1, dtype=torch.int32, device=self.options.device) if way.ragged else None
        q = self.q if way.ragged else self.q[:, None]
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=self.options.device)
        plan = None
        if way.plan:
            plan = self.ops.get_scheduler_metadata(
                *(s.batch, 1, longest, s.q_heads, s.kv_heads, s.head_dim, s.head_dim, self.dtype, self.used, starts),
                *(None, None, None, None, way.page, 0, True, -1, -1, False, way.splits, None, 0),
            )

        def call() -> Tensor:
            forward(
                self.ops, q, k, v, out, splits=way.splits, table=table, used=self.used, starts=starts, plan=plan,
                longest=(1, longest) if way.ragged else None, scales=scales,
            )  # fmt: skip
            return out.view(s.batch, s.q_heads, s.head_dim)

        return call

    def measure(self, way: str) -> dict[str, Any]:
        chosen = next(w for w in WAYS if str(w) == way)
        return self.timed([self._call(chosen, x) for x in self.kv], lambda out: self.error(out, chosen.page))

    def error(self, out: Tensor, page: int) -> float:
        """Relative error of the last request's answer over the first cache."""
        s, blocks = self.shape, self.tables[page][-1].long()
        # As bytes: not every release gathers FP8.
        taken = (x.view(torch.uint8).view(-1, page, s.kv_heads, s.head_dim * x.itemsize)[blocks] for x in self.kv[0])
        k, v = (x.view(self.dtype).flatten(0, 1)[: s.context].float() for x in taken)
        return relative_error(out[-1], dense_reference(self.q[-1:].float(), k, v)[0])


class DecodeFp8(DecodeBf16):
    """The same with q, k, v in float8_e4m3fn; compared with float64 on the same FP8 numbers."""

    dtype = torch.float8_e4m3fn
    limit = FP8_LIMIT

    def fields(self) -> dict[str, Any]:
        return {"k_bits": 8, "v_bits": 8}

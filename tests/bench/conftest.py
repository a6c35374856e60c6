# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of foreign kernels on the CPU, with the signatures of the real ones: they compute what those document."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

FA3_SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
PLAN_SCHEMA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor"
)
"""As vLLM 0.25.1 registers them."""


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal, aligned at the end: q [n, q_heads, d], k, v [t, kv_heads, d]."""
    return attend_lse(q, k, v, scale, True)[0]


def attend_lse(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The same, causal or not, with the log-sum-exp [q_heads, n]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    n, t = q.shape[0], k.shape[1]
    seen = torch.arange(t) <= torch.arange(t - n, t)[:, None]
    logits = q.double().transpose(0, 1) @ k.mT * scale
    if causal:
        logits = logits.masked_fill(~seen, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(0, 1), logits.logsumexp(-1)


def fa3_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    out, starts, key_starts, used, longest, table = *rest[3:6], rest[8], rest[9:11], rest[11]
    descale, scale, causal = rest[17:20], rest[20], rest[21]
    if starts is None and used is None:
        raise RuntimeError("This flash attention build only supports varlen (for build size reasons).")
    assert causal or table is None
    assert rest[22:24] == (-1, -1)
    assert (descale[0] is None) == (q.dtype != torch.float8_e4m3fn)
    assert out is None or out.dtype == (torch.bfloat16 if descale[0] is not None else q.dtype)
    made = torch.empty_like(q) if out is None else out
    if table is None:
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (starts, key_starts))
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
        for (a, b), (c, d) in zip(starts.unfold(0, 2, 1).tolist(), key_starts.unfold(0, 2, 1).tolist(), strict=True):
            assert b - a <= longest[0]
            assert d - c <= longest[1]
            made[a:b], lse[:, a:b] = attend_lse(q[a:b], k[c:d], v[c:d], scale, causal)
        return [made, lse]
    assert (starts is None) == (longest == (None, None))
    for i in range(table.shape[0]):
        rows = [x[table[i].long()].flatten(0, 1)[: int(used[i])] for x in (k, v)]
        query = q[i : i + 1] if starts is not None else q[i]
        made[i].copy_(attend(query, *rows, scale)[0] if starts is not None else attend(query, *rows, scale))
    return [made, torch.zeros(1)]


@pytest.fixture
def fake_fa3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``torch.ops``-like namespace with vLLM's schemas, so that an argument too many or of another type is refused."""
    from oscar_kv.bench.contenders import caches, dense, fa3, model, oscar_prefill  # all who import what is replaced

    library = torch.library.Library("oscar_kv_test_fa3", "FRAGMENT")
    library.define(FA3_SCHEMA)
    library.define(PLAN_SCHEMA)
    library.impl("fwd", fa3_forward, "CompositeExplicitAutograd")
    library.impl("get_scheduler_metadata", lambda *a: torch.zeros(1), "CompositeExplicitAutograd")
    ops = torch.ops.oscar_kv_test_fa3
    for module in (fa3, dense, caches, oscar_prefill):
        monkeypatch.setattr(module, "load", lambda given: ops)
    for module in (fa3, dense, model, oscar_prefill):
        monkeypatch.setattr(module, "why_no_fa3", lambda given: None)
    yield ops
    library._destroy()


class Wrapper:
    """FlashInfer's decode wrapper in CUDA-graph mode."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        assert options["use_cuda_graph"]
        self.buffers = [options[f"paged_kv_{n}_buffer"] for n in ("indptr", "indices", "last_page_len")]

    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, q: int, kv: int, d: int, page: int, **o: Any) -> None:
        for buffer, given in zip(self.buffers, (indptr, indices, last), strict=True):
            buffer[: len(given)].copy_(given)
        self.page, self.kv_dtype = page, o["kv_data_type"]

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        indptr, indices, last = self.buffers
        assert kv[0].dtype == self.kv_dtype
        for i in range(len(last)):
            blocks = indices[indptr[i] : indptr[i + 1]].long()
            n = (len(blocks) - 1) * self.page + int(last[i])
            out[i : i + 1] = attend(q[i : i + 1], *(x[blocks].flatten(0, 1)[:n] for x in kv), q.shape[-1] ** -0.5)


@pytest.fixture
def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    from oscar_kv.bench.contenders import dense, flashinfer  # noqa: F401  (dense imports from the other)

    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    module.single_prefill_with_kv_cache = (  # type: ignore[attr-defined]
        lambda q, k, v, causal: attend(q, k, v, q.shape[-1] ** -0.5).to(q.dtype)
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "WORKSPACE", 16)


def sglang_decode(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, kv_indptr: Tensor, kv_indices: Tensor, attn_logits: Tensor,
    attn_lse: Tensor, num_kv_splits: Tensor, max_kv_splits: int, sm_scale: float, k_scale: float, v_scale: float,
    logit_cap: float = 0.0,
) -> None:  # fmt: skip
    assert attn_logits.shape[2] == max_kv_splits == int(num_kv_splits.max())
    assert attn_lse.shape == attn_logits.shape[:3]
    for i in range(len(q)):
        rows = kv_indices[kv_indptr[i] : kv_indptr[i + 1]]
        o[i : i + 1] = attend(q[i : i + 1], k[rows], v[rows], sm_scale)


@pytest.fixture
def fake_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang as before 0.5.16, so that both places are looked in."""
    place = "sglang.srt.layers.attention.triton_ops.decode_attention"
    for i in range(1, place.count(".") + 2):
        name = ".".join(place.split(".")[:i])
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules[place].decode_attention_fwd = sglang_decode  # type: ignore[attr-defined]

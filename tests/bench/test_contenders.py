# SPDX-License-Identifier: Apache-2.0
"""Every contender is called as its library documents, and a wrong answer is seen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kv.bench.contenders import find, names
from oscar_kv.bench.contenders.base import Contender, Options
from oscar_kv.bench.contenders.fa3 import WAYS, extension, why_no_fa3
from oscar_kv.bench.shapes import TINY, TINY_MODEL, TINY_PREFILL, PromptShape, Shape
from oscar_kv.errors import OscarError

CPU = Options(device="cpu", replays=1)
PROMPT = PromptShape(q_heads=4, kv_heads=2, head_dim=16, chunk=100)


def measured(part: str, name: str, shape: Shape) -> list[dict[str, Any]]:
    c = find(part, name, CPU)
    torch.manual_seed(0)
    c.prepare(shape)
    with torch.no_grad():
        found = [c.measure(way) for way in c.ways(shape)]
    assert all(f["error"] <= c.limit for f in found), found
    c.release()
    return found


@pytest.mark.parametrize("name", ["fa3-bf16", "fa3-fp8"])
def test_fa3_is_called_as_its_schema_says_and_its_answer_checked(fake_fa3: Any, name: str) -> None:
    found = measured("decode", name, TINY)
    assert len(found) == len(WAYS)
    assert all(f["error"] < 0.006 for f in found), "the stand-in is exact but for its BF16 output"


@pytest.mark.parametrize("name", ["flashinfer-bf16", "flashinfer-fp8"])
def test_flashinfer_gets_the_pages_of_each_request(fake_flashinfer: None, name: str) -> None:
    measured("decode", name, replace(TINY, context=500, batch=3))


def test_sglang_gets_the_tokens_of_each_request(fake_sglang: None) -> None:
    assert len(measured("decode", "triton-bf16", replace(TINY, context=500, batch=3))) == 3


@pytest.mark.parametrize("name", ["fa3-bf16", "sdpa-bf16"])
def test_dense_prefill_is_causal_and_aligned_at_the_end(fake_fa3: Any, name: str) -> None:
    measured("prefill", name, TINY_PREFILL)
    measured("layer", name, PROMPT)


@pytest.mark.parametrize("batched", [False, True])
def test_our_prefix_is_given_to_fa3_where_its_extension_is_loaded(
    fake_fa3: Any, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    """The stand-in refuses all but ragged batches, as vLLM's build does; its log-sum-exp comes in either layout."""
    from oscar_kv.kernels import dense

    def forward(*arguments: Any) -> list[torch.Tensor]:
        out, lse = fake_fa3.fwd(*arguments)
        return [out, lse[None] if batched else lse]

    offered = [dense.Dense("FlashAttention-3 (vLLM)", dense._vllm), dense.Dense("plain", dense.plain)]
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=forward), raising=False)
    monkeypatch.setattr(dense, "_candidates", lambda device, dtype: iter(offered))
    monkeypatch.setattr(dense, "_chosen", {})
    (found,) = measured("prefill", "oscar-torch", replace(TINY_PREFILL, head_dim=32))
    assert found["dense"] == "FlashAttention-3 (vLLM)"
    assert "FlashAttention-3 (vLLM)" in found["notes"]
    monkeypatch.setattr(dense, "_chosen", {})
    monkeypatch.delattr(torch.ops, "_vllm_fa3_C")
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=lambda *a: fake_fa3.fwd(*a[:7], None, *a[8:])),
                        raising=False)  # fmt: skip
    assert dense.choose(4, 2, 32, 32, torch.float32, torch.device("cpu")).name == "plain", "it raised"


def test_flashinfer_prefill(fake_flashinfer: None) -> None:
    measured("prefill", "flashinfer-bf16", TINY_PREFILL)


def test_the_two_parts_of_a_chunk_merge_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's two calls, with stand-ins for it: outputs and natural log-sum-exps of each part."""
    from oscar_kv.bench.contenders import dense

    def part(q: Any, k: Any, v: Any, bias: None, lse: bool, p: float, causal: bool, debug: bool) -> tuple[Any, Any]:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return logits.softmax(-1) @ v, logits.logsumexp(-1, keepdim=True)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", part)
    q, k, v = torch.randn(7, 4, 16), torch.randn(30, 2, 16), torch.randn(30, 2, 16)
    assert torch.allclose(dense.cudnn(q, k, v), dense.plain(q, k, v), atol=1e-5)
    assert torch.allclose(dense.cudnn(q, k[-7:], v[-7:]), dense.plain(q, k[-7:], v[-7:]), atol=1e-5)


def test_a_model_with_a_paged_bf16_cache_attends_to_what_it_stored(fake_fa3: Any) -> None:
    found = measured("model", "fa3-bf16", TINY_MODEL)
    assert len(found) == 2
    assert found[0]["batch"] == TINY_MODEL.batch


@pytest.mark.parametrize(("part", "shape"), [("decode", TINY), ("prefill", TINY_PREFILL), ("model", TINY_MODEL)])
def test_a_wrong_answer_is_seen(part: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour's values in place of one's own: as plausible as can be, and wrong."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **o: sdpa(q, k, v.flip(-2), **o)
    )
    c = find(part, "sdpa-bf16", CPU)
    c.prepare(shape)
    with torch.no_grad():
        assert c.measure(c.ways(shape)[0])["error"] > c.limit


def test_a_history_that_is_not_read_is_seen() -> None:
    """The check must depend on the history, and not on the windows and the centre alone."""
    c: Any = find("decode", "oscar-torch", CPU)
    reason = c.missing()
    assert reason is None, reason
    c.prepare(replace(TINY, context=4096))
    right = c.decode
    c.decode = lambda q, pages, *rest: right(q, pages.flip(0).contiguous(), *rest)
    assert c.measure("default")["error"] > 10 * c.limit


def test_what_is_missing_says_why() -> None:
    for part in ("decode", "prefill", "model"):
        for name in names(part):
            reason = find(part, name, CPU).missing()
            assert reason is None or len(reason) > 10
    assert "no such file" in str(why_no_fa3("nowhere.so"))
    assert extension("some.so") is not None


def test_an_unknown_contender_is_refused_with_those_there_are() -> None:
    with pytest.raises(OscarError, match="fa3-bf16"):
        find("decode", "fa4", CPU)


def test_release_drops_the_inputs() -> None:
    c: Contender = find("decode", "sdpa-bf16", CPU)
    c.prepare(TINY)
    assert hasattr(c, "kv")
    c.release()
    assert not hasattr(c, "kv")
    assert c.name == "sdpa-bf16"

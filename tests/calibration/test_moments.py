# SPDX-License-Identifier: Apache-2.0
"""Streaming moments against a dense computation in fp64; merging; the floor; damage."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from families import CONFIGS, ids_of, tiny

from oscar_kv.calibration import (
    MIN_HISTORY_QUERIES,
    MIN_TOKENS,
    Moments,
    collect,
    stream,
)
from oscar_kv.calibration.stream import FIELDS, chunk_sums, history_weights
from oscar_kv.errors import CalibrationError, UnsupportedModelError
from oscar_kv.integrations.transformers.capture import capture

WINDOWS = {"sink": 5, "recent": 70}


def dense(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None, sink: int, recent: int
) -> dict[str, Tensor]:
    """Every sum from its definition, with the whole matrix of probabilities in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    heads, n, _ = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    out: dict[str, list[Tensor]] = {f: [] for f in FIELDS}
    i, t = torch.arange(n)[:, None], torch.arange(n)[None]
    history = (t >= sink) & (i - t >= recent)
    for h in range(kv_heads):
        w = torch.zeros(n, dtype=torch.float64)
        uq, u_sum = 0, 0
        for g in range(h * group, (h + 1) * group):
            s = q[g] @ k[h].T * scaling
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            p2 = s.masked_fill(t > i, float("-inf")).softmax(-1).square() * history
            w += p2.sum(0)
            u = p2.sum(1)
            uq = uq + torch.einsum("n,ni,nj->ij", u, q[g], q[g])
            u_sum = u_sum + u.sum()
        qg = q[h * group : (h + 1) * group].reshape(-1, q.shape[-1])
        c = torch.einsum("ni,ij,nj->n", k[h], qg.T @ qg / len(qg), k[h])
        values = {
            "k_sum": k[h].sum(0), "k_outer": k[h].T @ k[h], "v_sum": v[h].sum(0), "v_outer": v[h].T @ v[h],
            "w_sum": w.sum(), "wv_sum": w @ v[h], "wv_outer": torch.einsum("n,ni,nj->ij", w, v[h], v[h]),
            "u_sum": u_sum, "uq_outer": uq, "q_outer": qg.T @ qg,
            "c_sum": c.sum(), "cv_sum": c @ v[h], "cv_outer": torch.einsum("n,ni,nj->ij", c, v[h], v[h]),
        }  # fmt: skip
        for f, x in values.items():
            out[f].append(x)
    return {f: torch.stack(x) for f, x in out.items()}


@pytest.mark.parametrize(("sink", "recent"), [(5, 70), (0, 1), (0, 64), (64, 256), (200, 150), (300, 300)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("block", [1, 1 << 13, 1 << 22])
def test_sums_equal_the_dense_computation(
    monkeypatch: pytest.MonkeyPatch, sink: int, recent: int, softcap: float | None, block: int
) -> None:
    monkeypatch.setitem(stream._BLOCK, "cpu", block)
    g = torch.Generator().manual_seed(sink + recent)
    q, k = (torch.randn(h, 333, 16, generator=g) * 1.5 for h in (4, 2))
    v = torch.randn(2, 333, 32, generator=g) + 1
    have = chunk_sums(q, k, v, scaling=0.4, softcap=softcap, sink=sink, recent=recent)
    want = dense(q, k, v, 0.4, softcap, sink, recent)
    for f in FIELDS:
        assert have[f].dtype == torch.float64
        scale = want[f].abs().amax().clamp(min=1e-30)  # probabilities are fp32, so entries that cancel keep its noise
        assert ((have[f] - want[f]) / scale).abs().max() < 1e-5, f
    if sink + recent < 333:
        assert (have["w_sum"] > 0).all()
    torch.testing.assert_close(have["w_sum"], have["u_sum"])


def test_no_weight_outside_the_history() -> None:
    q, k = torch.randn(2, 100, 16), torch.randn(1, 100, 16)
    w, u = history_weights(q, k, scaling=0.25, softcap=None, sink=7, recent=30)
    assert (w[:, :7] == 0).all() and (w[:, 70:] == 0).all() and (w[:, 7:70] > 0).all()
    assert (u[:, :37] == 0).all() and (u[:, 37:] > 0).all()


@pytest.mark.parametrize("family", CONFIGS)
def test_collect_sums_what_the_model_computes(family: str) -> None:
    model = tiny(family)
    chunks = [ids_of(700, 1), ids_of(600, 2)]
    moments = collect(model, chunks, progress=False, model_id="toy", **WINDOWS)
    want: dict[int, dict[str, Tensor]] = {}

    def add(i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None) -> None:
        if i in moments.layers:
            sums = dense(q[0], k[0], v[0], scaling, softcap, **WINDOWS)
            want[i] = {f: want[i][f] + x for f, x in sums.items()} if i in want else sums

    with torch.no_grad(), capture(model, add):
        for chunk in chunks:
            model(input_ids=chunk[None], use_cache=False)
    full = [i for i, layer in enumerate(moments.meta.layers) if layer.kind == "full"]
    assert sorted(moments.layers) == sorted(want) == full
    for i in full:
        for f in FIELDS:
            scale = want[i][f].abs().max()
            torch.testing.assert_close(moments.layers[i][f] / scale, want[i][f] / scale, rtol=1e-4, atol=1e-6)
    assert moments.meta.tokens == 1300 and moments.meta.chunk == 700
    assert moments.meta.history_queries == 1300 - 2 * 75


def test_moments_of_two_texts_add_up(tmp_path: Any) -> None:
    model = tiny("qwen2")
    a, b = [ids_of(1100, 1)], [ids_of(1050, 2), ids_of(500, 3)]
    both = collect(model, [*a, *b], progress=False, **WINDOWS)
    one, two = (collect(model, c, progress=False, data=name, **WINDOWS) for c, name in ((a, "a"), (b, "b")))
    total = one + two
    assert total.meta.tokens == both.meta.tokens and total.meta.history_queries == both.meta.history_queries
    assert total.meta.data == "a + b"
    for i, sums in both.layers.items():
        for f in FIELDS:
            torch.testing.assert_close(total.layers[i][f], sums[f], rtol=1e-12, atol=1e-12)
    with pytest.raises(CalibrationError, match="recent differs"):
        one + collect(model, a, progress=False, sink=5, recent=71)
    with pytest.raises(CalibrationError, match="weight_samples differs"):
        one + collect(tiny("qwen2", seed=1), a, progress=False, **WINDOWS)


def test_memory_does_not_grow_with_tokens() -> None:
    """What is kept between chunks is the sums alone, and their size is that of one chunk's."""
    model = tiny("llama")
    sizes, peaks = [], []
    for count in (2, 6):
        chunks = [ids_of(600, i) for i in range(count)]
        live: list[int] = []

        def note(done: int, total: int, live: list[int] = live) -> None:
            if done % 2:
                return
            gc.collect()
            live.append(sum(x.numel() * x.element_size() for x in gc.get_objects() if type(x) is Tensor))

        tracemalloc.start()
        moments = collect(model, chunks, progress=note, **WINDOWS)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(sum(x.numel() * x.element_size() for x in moments.tensors().values()))
        assert len(live) == count and max(live) - min(live) < 600 * 64 * 4 * 4, "tensors pile up from chunk to chunk"
    assert sizes[0] == sizes[1]
    assert peaks[1] < 2 * peaks[0] + 1e6


def test_save_and_load(tmp_path: Any) -> None:
    moments = collect(tiny("llama"), [ids_of(1100, 1)], progress=False, data="text", **WINDOWS)
    path = moments.save(tmp_path / "deep" / "m.safetensors")
    again = Moments.load(path)
    assert again.meta.model_dump(exclude={"tensors_sha256"}) == moments.meta.model_dump(exclude={"tensors_sha256"})
    for name, x in moments.tensors().items():
        assert torch.equal(x, again.tensors()[name])


def test_damaged_files_are_named(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    moments = collect(tiny("llama"), [ids_of(1100, 1)], progress=False, **WINDOWS)
    path = moments.save(tmp_path / "m.safetensors")
    raw = path.read_bytes()
    cases = {
        "no such file": None,
        "not a readable safetensors": raw[: len(raw) // 2],
        "tensors_sha256": raw[:-8] + b"\0" * 7 + b"\1",
    }
    for says, content in cases.items():
        bad = tmp_path / "bad.safetensors"
        bad.unlink(missing_ok=True)
        if content is not None:
            bad.write_bytes(content)
        with pytest.raises(CalibrationError, match=says) as error:
            Moments.load(bad)
        assert "bad.safetensors" in str(error.value)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CalibrationError, match="not one of moments"):
        Moments.load(tmp_path / "other.safetensors")
    moments.layers[1]["uq_outer"][0, 0, 0] = float("nan")
    moments.save(tmp_path / "nan.safetensors")
    with pytest.raises(CalibrationError, match=r"layers\.1\.uq_outer"):
        Moments.load(tmp_path / "nan.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "v.safetensors", metadata={"oscar_kv_moments": '{"format_version": 9}'})
    with pytest.raises(CalibrationError, match="format_version 9"):
        Moments.load(tmp_path / "v.safetensors")


def test_the_floor() -> None:
    model = tiny("llama")
    with pytest.raises(
        CalibrationError, match=f"{MIN_TOKENS - 1} calibration tokens, the floor is MIN_TOKENS = {MIN_TOKENS}"
    ):
        collect(model, [ids_of(MIN_TOKENS - 1, 1)], progress=False)
    with pytest.raises(CalibrationError, match=f"the floor is {MIN_HISTORY_QUERIES}: use longer chunks"):
        collect(model, [ids_of(320, i) for i in range(10)], progress=False)
    assert collect(model, [ids_of(MIN_TOKENS, 1)], progress=False).meta.history_queries == MIN_TOKENS - 320


def test_bad_input_is_named() -> None:
    model = tiny("llama")
    with pytest.raises(CalibrationError, match="chunk 0: expected a 1-D integer tensor"):
        collect(model, [torch.zeros(1, 2000, dtype=torch.long)], progress=False)
    with pytest.raises(CalibrationError, match="recent=0"):
        collect(model, [ids_of(2000, 1)], recent=0, progress=False)
    with pytest.raises(UnsupportedModelError, match="no full-attention layer"):
        collect(tiny("mistral", sliding_window=64), [ids_of(2000, 1)], progress=False)


@pytest.mark.parametrize(("part", "says"), [("k_proj", "keys"), ("v_proj", "values"), ("q_proj", "queries")])
def test_non_finite_activations_name_the_layer(part: str, says: str) -> None:
    model = tiny("llama")
    getattr(model.model.layers[1].self_attn, part).weight.data[3] = float("inf")
    with pytest.raises(CalibrationError, match=f"layer 1: {says} hold NaN or infinity"):
        collect(model, [ids_of(1100, 1)], progress=False)


def test_progress_counts_layers_of_chunks() -> None:
    seen: list[tuple[int, int]] = []
    collect(tiny("llama"), [ids_of(600, 1), ids_of(600, 2)], progress=lambda *x: seen.append(x), **WINDOWS)
    assert seen == [(i, 4) for i in range(1, 5)]

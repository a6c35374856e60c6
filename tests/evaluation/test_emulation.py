# SPDX-License-Identifier: Apache-2.0
"""Emulation against an oracle that loops over queries and builds every key list by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_kv.artifact import Artifact
from oscar_kv.codec import LayerCodec
from oscar_kv.errors import ArtifactError, OscarError
from oscar_kv.evaluation import emulation
from oscar_kv.evaluation.emulation import Emulation, emulated
from oscar_kv.geometry import LayerGeometry
from oscar_kv.recipe import get_recipe

SMALL = get_recipe("k2v2").replace(name="small", sink=16, recent=64)


def oracle(
    codec: LayerCodec, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None, sink: int, recent: int,
    first: int = 0,
) -> Tensor:  # fmt: skip
    """One row: q [Hq, n, d], k, v [Hkv, n, d] → [n, Hq, dv], fp64, from query ``first`` on, by way of page bytes."""
    n, whole = q.shape[1], q.shape[1] // 64
    pages = [x[:, : whole * 64].unflatten(1, (whole, 64)).transpose(0, 1) for x in (k, v)]
    hat = [x.transpose(0, 1).flatten(1, 2) for x in codec.decode(codec.encode(*pages))]
    out = torch.zeros(n, q.shape[0], v.shape[-1], dtype=torch.float64)
    for head in range(q.shape[0]):
        h = head // (q.shape[0] // k.shape[0])
        for i in range(first, n):
            old = [t for t in range(i + 1) if t >= sink and i - t >= recent]
            new = [t for t in range(i + 1) if t not in old]
            keys = torch.cat([hat[0][h, old], k[h, new]]) if old else k[h, new]
            values = torch.cat([hat[1][h, old], v[h, new]]) if old else v[h, new]
            logits = keys @ q[head, i] * scaling
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            out[i, head] = logits.softmax(-1) @ values
    return out


def rows(layer: LayerGeometry, n: int, batch: int = 1, offset: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(n)
    sizes = (
        (layer.num_q_heads, layer.k_head_dim),
        (layer.num_kv_heads, layer.k_head_dim),
        (layer.num_kv_heads, layer.v_head_dim),
    )
    q, k, v = (torch.randn(batch, h, n, d, generator=gen, dtype=torch.float64) for h, d in sizes)
    return q, k + offset, v - offset


GEOMETRIES = {
    "gqa": LayerGeometry(kind="full", num_q_heads=4, num_kv_heads=2, k_head_dim=32, v_head_dim=32),
    "mqa": LayerGeometry(kind="full", num_q_heads=3, num_kv_heads=1, k_head_dim=16, v_head_dim=16),
    "mha": LayerGeometry(kind="full", num_q_heads=2, num_kv_heads=2, k_head_dim=48, v_head_dim=48),
    "wide keys": LayerGeometry(kind="full", num_q_heads=2, num_kv_heads=1, k_head_dim=48, v_head_dim=16),
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize(("recipe", "softcap"), [(SMALL, None), (SMALL, 5.0), ("naive", None), ("k3v2", None)])
def test_every_query_sees_what_the_oracle_lists(
    geometry: LayerGeometry, recipe: Any, softcap: float | None, artifact_of: Callable[..., Artifact]
) -> None:
    artifact = artifact_of((geometry,), get_recipe(recipe).replace(sink=16, recent=64))
    q, k, v = rows(geometry, 200)
    got = Emulation(artifact, "cpu", torch.float64).attend(0, q, k, v, 0.2, softcap)[0]
    want = oracle(artifact.codec(0, dtype=torch.float64), q[0], k[0], v[0], 0.2, softcap, 16, 64)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [81, 127, 128, 129, 192, 193])
@pytest.mark.parametrize(("sink", "recent"), [(16, 64), (0, 64), (64, 64), (70, 65)])
def test_window_borders_and_blocks(
    n: int, sink: int, recent: int, artifact_of: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = GEOMETRIES["mqa"]
    if n <= sink + recent:
        return
    artifact = artifact_of((geometry,), SMALL.replace(sink=sink, recent=recent))
    q, k, v = rows(geometry, n)
    want = oracle(artifact.codec(0, dtype=torch.float64), q[0], k[0], v[0], 0.3, None, sink, recent)
    for scores, flash in (
        (1, False),
        (1 << 22, False),
        (1, True),
    ):  # blocks of 16 queries, one block, no history blocks
        monkeypatch.setitem(emulation._SCORES, "cpu", scores)
        pass_ = Emulation(artifact, "cpu", torch.float64)
        pass_.flash = flash
        got = pass_.attend(0, q, k, v, 0.3, None)[0]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_rows_of_a_batch_do_not_meet(artifact_of: Callable[..., Artifact]) -> None:
    geometry = GEOMETRIES["gqa"]
    pass_ = Emulation(artifact_of((geometry,), SMALL), "cpu", torch.float64)
    q, k, v = rows(geometry, 200, batch=2)
    both = pass_.attend(0, q, k, v, 0.2, None)
    for i in range(2):
        alone = pass_.attend(0, q[i : i + 1], k[i : i + 1], v[i : i + 1], 0.2, None)
        torch.testing.assert_close(both[i], alone[0], rtol=1e-12, atol=1e-12)


def test_large_key_offsets_cost_no_precision(artifact_of: Callable[..., Artifact]) -> None:
    """fp32 rows whose offset is a thousand times their spread: as good as fp64 on the same codes."""
    geometry = GEOMETRIES["gqa"]
    artifact = artifact_of((geometry,), SMALL, offset=0.0)
    k_centre = torch.full_like(artifact.layers[0].k.centre, 1024.0)
    object.__setattr__(artifact.layers[0].k, "centre", k_centre)
    q, k, v = rows(geometry, 200, offset=0.0)
    k = (k.half() + 1024).double()  # exact in fp32
    q = q.half().double()
    fine, coarse = (
        Emulation(artifact, "cpu", dtype).attend(0, q.to(dtype), k.to(dtype), v.half().to(dtype), 0.2, None)
        for dtype in (torch.float64, torch.float32)
    )
    plain = (
        ((q @ k.repeat_interleave(2, 1).mT).float() - (q.float() @ k.float().repeat_interleave(2, 1).mT)).abs().max()
    )
    assert (fine - coarse.double()).abs().max() < 1e-4
    assert plain > 1e-3  # what logits of raw rows would lose


def test_flash_and_blocks_agree(artifact_of: Callable[..., Artifact]) -> None:
    """The square causal pattern of one flash call, and blocks of queries with masks: the same in fp64."""
    geometry = GEOMETRIES["gqa"]
    pass_ = Emulation(artifact_of((geometry,), SMALL), "cpu", torch.float64)
    q, k, v = rows(geometry, 300, batch=2)
    flashed = pass_.attend(0, q, k, v, 0.2, None)
    pass_.flash = False
    torch.testing.assert_close(pass_.attend(0, q, k, v, 0.2, None), flashed, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_a_gpu_agrees_with_the_cpu(fast: bool, artifact_of: Callable[..., Artifact]) -> None:
    """Plain rounding: its codes do not hang on the last bit of an earlier dimension."""
    geometry = LayerGeometry(kind="full", num_q_heads=4, num_kv_heads=2, k_head_dim=64, v_head_dim=64)
    artifact = artifact_of((geometry,), get_recipe("k2v2-plain").replace(sink=16, recent=64))
    q, k, v = (x.float() for x in rows(geometry, 1000))
    want = Emulation(artifact, "cpu").attend(0, q, k, v, 0.1, None)
    got = Emulation(artifact, "cuda", fast=fast).attend(0, q.cuda(), k.cuda(), v.cuda(), 0.1, None).cpu()
    assert (got - want).abs().mean() < (2e-3 if fast else 2e-4) * want.std()


def fitted(families: Any, family: str, artifact_of: Callable[..., Artifact], **fields: Any) -> tuple[Any, Artifact]:
    from oscar_kv.calibration import data_free
    from oscar_kv.integrations.transformers.geometry import layer_geometries

    model = families.tiny(family, **fields).double()
    made = artifact_of(layer_geometries(model.config), "k2v2")
    own = data_free(model.config, "tiny").meta.model  # of this model, so that check_model agrees
    return model, Artifact(made.meta.model_copy(update={"model": own}), made.layers)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi", "gemma2", "gemma3"])
def test_models_hand_over_their_own_scaling_and_cap(
    family: str, families: Any, artifact_of: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, artifact = fitted(families, family, artifact_of)
    if family in families.SOFTCAP:
        model.set_attn_implementation("eager")
    seen: list[int] = []
    attend = Emulation.attend

    def spy(
        self: Emulation, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None
    ) -> Tensor:
        out = attend(self, layer, q, k, v, scaling, softcap)
        assert softcap == families.SOFTCAP.get(family)
        want = oracle(
            artifact.codec(layer, dtype=torch.float64), q[0], k[0], v[0], scaling, softcap, 64, 256, first=300
        )
        torch.testing.assert_close(out[0, 300:], want[300:], rtol=1e-8, atol=1e-8)
        seen.append(layer)
        return out

    monkeypatch.setattr(Emulation, "attend", spy)
    ids = families.ids_of(350, 1)[None]
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        with emulated(model, artifact):
            logits = model(ids, use_cache=False).logits
        again = model(ids, use_cache=False).logits
    assert seen == sorted(artifact.layers)
    assert torch.equal(plain, again)
    loose = 1e-4 if model.config._attn_implementation == "eager" else 1e-9  # eager attention has an fp32 softmax
    torch.testing.assert_close(logits[:, :320], plain[:, :320], rtol=loose, atol=loose)
    assert (logits[:, 322:] - plain[:, 322:]).abs().max() > 1e-3


@pytest.mark.parametrize("stock", ["sdpa", "eager"])
def test_short_texts_are_bit_identical(stock: str, families: Any, artifact_of: Callable[..., Artifact]) -> None:
    model, artifact = fitted(families, "llama", artifact_of)
    model.float().set_attn_implementation(stock)
    ids = families.ids_of(320, 2)[None]
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        with emulated(model, artifact):
            assert torch.equal(model(ids, use_cache=False).logits, plain)
    assert model.config._attn_implementation == stock


def test_exact_prefill_leaves_the_prompt_alone(families: Any, artifact_of: Callable[..., Artifact]) -> None:
    model, artifact = fitted(families, "llama", artifact_of)
    ids = families.ids_of(420, 3)[None]
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        with emulated(model, artifact, prefill=400):
            served = model(ids, use_cache=False).logits
        with emulated(model, artifact):
            strict = model(ids, use_cache=False).logits
    assert torch.equal(served[:, :400], plain[:, :400])
    assert (served[:, 400:] - plain[:, 400:]).abs().max() > 1e-3
    assert (served[:, 400:] - strict[:, 400:]).abs().max() > 1e-6


def test_what_it_cannot_follow_is_refused(families: Any, artifact_of: Callable[..., Artifact]) -> None:
    model, artifact = fitted(families, "llama", artifact_of)
    other, _ = fitted(families, "llama-mqa", artifact_of)
    ids = families.ids_of(330, 4)[None]
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    with torch.no_grad():
        with pytest.raises(ArtifactError), emulated(other, artifact):
            pass
        with emulated(model, artifact):
            with pytest.raises(OscarError, match="padding"):
                model(ids, attention_mask=padding, use_cache=False)
            with pytest.raises(OscarError, match="already"), emulated(model, artifact):
                pass
            short = model(ids[:, :300], use_cache=True)
            with pytest.raises(OscarError, match="use_cache=False"):
                model(ids[:, 300:], past_key_values=short.past_key_values)
    capped, own = fitted(families, "gemma2", artifact_of)
    capped.config._attn_implementation_internal = "sdpa"  # newer releases of Transformers refuse this themselves
    with torch.no_grad(), emulated(capped, own), pytest.raises(ValueError, match="eager"):
        capped(ids, use_cache=False)
    with pytest.raises(OscarError, match="CUDA"):
        Emulation(artifact, "cpu", fast=True)

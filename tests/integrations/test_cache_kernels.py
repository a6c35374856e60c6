# SPDX-License-Identifier: Apache-2.0
"""OscarCache on a kernel set: the same calls as on a GPU, with the kernels in PyTorch, against the reference path."""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from oracle import oracle
from tiny import artifact_of, model, tokens

from oscar_kv import OscarCache, enable
from oscar_kv.errors import CacheError, OscarError
from oscar_kv.integrations.transformers.compat import cache_argument
from oscar_kv.kernels import registry
from oscar_kv.kernels.torch_set import kernel_set

SMALL = {"sink": 32, "recent": 70, "slack": 8}
PLAIN = "k2v2-plain"
"""Written by tables and by the codec to the same bit; shaped codes may differ where a tie is broken."""


def on_kernels(m: Any, recipe: str = PLAIN, **changes: Any) -> tuple[OscarCache, OscarCache]:
    """Two empty caches of an enabled model: on kernels, and on the reference path."""
    artifact = artifact_of(m, recipe, **{**SMALL, **changes})
    enable(m, artifact)
    return OscarCache(artifact, m.config, kernels=kernel_set()), OscarCache(artifact, m.config)


def run(m: Any, ids: torch.Tensor, cache: Any, chunks: list[int], mask: torch.Tensor | None = None,
        past: int = 0) -> torch.Tensor:  # fmt: skip
    """Logits of a text that goes on after ``past`` slots, in chunks, then token by token."""
    out, at = [], past
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    for size in [*chunks, *[1] * (ids.shape[1] - past - sum(chunks))]:
        part = slice(at, at + size)
        extra = {} if mask is None else {"attention_mask": mask[:, : at + size], "position_ids": positions[:, part]}
        with torch.no_grad():
            out.append(m(input_ids=ids[:, part], use_cache=True, **{cache_argument(): cache}, **extra).logits)
        at += size
    return torch.cat(out, 1)


def close(got: torch.Tensor, wanted: torch.Tensor, limit: float = 2e-4) -> None:
    assert float((got - wanted).abs().max()) < limit * float(wanted.abs().max())


def same_pages(a: OscarCache, b: OscarCache) -> None:
    for x, y in zip(a.packed_layers, b.packed_layers, strict=True):
        p, q = x.store.state(), y.store.state()
        assert torch.equal(p["lengths"], q["lengths"])
        assert torch.equal(p["raw_from"], q["raw_from"])
        if len(p["pages"]):
            assert float((p["pages"] != q["pages"]).double().mean()) < 1e-3


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("qwen3", {}), ("gemma2", {}), ("llama", {"num_key_value_heads": 4}),
     ("llama", {"num_key_value_heads": 1}), ("gemma3_text", {})],
    ids=["gqa", "qwen3", "softcap", "mha", "mqa", "sliding"],
)  # fmt: skip
def test_token_by_token_like_the_reference(family: str, fields: dict[str, Any]) -> None:
    m = model(family, **fields)
    ids = tokens(1, 220)
    kernels, plain = on_kernels(m)
    chunks = [110, 40, 5, 9]
    wanted = run(m, ids, plain, chunks)
    close(run(m, ids, kernels, chunks), wanted)
    same_pages(kernels, plain)
    assert kernels.describe()["kernels"]["store"] == "torch"


def test_the_dense_definition_in_fp64() -> None:
    """Shaped rounding, written by the codec (fp64): kernels against the definition itself."""
    m = model("llama", torch.float64, num_hidden_layers=1)
    artifact = artifact_of(m, **SMALL)
    ids = tokens(1, 170)
    chunks = [110, 30, 9]
    with oracle(m, artifact, chunks), torch.no_grad():
        wanted = m(input_ids=ids, use_cache=False).logits
    enable(m, artifact)
    own = kernel_set(artifact.codec(0, "cpu", torch.float64).encode)
    got = run(m, ids, OscarCache(artifact, m.config, kernels=own), chunks)
    assert (got - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padded_batches(side: str) -> None:
    m = model("llama")
    ids = tokens(3, 215)
    mask = torch.ones(3, 215, dtype=torch.long)
    if side == "left":
        mask[0, :57] = 0
        mask[2, :130] = 0
    elif side == "right":
        mask[0, 150:180] = 0
        mask[2, 60:180] = 0
    else:
        mask[0, 20:70] = 0
        mask[1, :5] = 0
        mask[2, 100:175:2] = 0
    mask[1, 190:200] = 0  # rows without a new token among rows with one
    kernels, plain = on_kernels(m)
    chunks = [120, 60, 6, 3]
    wanted, got = run(m, ids, plain, chunks, mask), run(m, ids, kernels, chunks, mask)
    close(got[mask.bool()], wanted[mask.bool()])
    same_pages(kernels, plain)


@pytest.mark.parametrize("size", [10, 71, 300])
def test_a_long_chunk_over_a_packed_prefix(size: int) -> None:
    m = model("qwen2")
    ids = tokens(2, 300 + size + 3)
    kernels, plain = on_kernels(m)
    chunks = [300, size]
    close(run(m, ids, kernels, chunks), run(m, ids, plain, chunks))


def test_crops_and_drafts() -> None:
    m = model("llama")
    ids = tokens(1, 240)
    kernels, plain = on_kernels(m)
    out = []
    for cache in (kernels, plain):
        run(m, ids[:, :200], cache, [190])
        cache.crop(-7)
        first = run(m, ids[:, :205], cache, [5, 9], past=193)
        cache.crop(-60)
        out.append(torch.cat([first, run(m, ids, cache, [20], past=145)], 1))
    close(out[0], out[1])
    same_pages(kernels, plain)


def test_beams_share_pages_and_part() -> None:
    m = model("llama")
    ids = tokens(2, 180)
    kernels, plain = on_kernels(m)
    out = []
    for cache in (kernels, plain):
        run(m, ids, cache, [180])
        cache.batch_repeat_interleave(2)
        more = tokens(4, 215, seed=3)
        a = run(m, more, cache, [20], past=180)
        cache.reorder_cache(torch.tensor([3, 0, 0, 2]))
        out.append(torch.cat([a, run(m, torch.cat([more, tokens(4, 40, seed=4)], 1), cache, [], past=215)], 1))
    close(out[0], out[1])
    same_pages(kernels, plain)
    assert kernels.packed_layers[0].store.pool.nbytes == plain.packed_layers[0].store.pool.nbytes


def test_generation_beams_and_assistants() -> None:
    m = model("llama")
    ids = tokens(1, 170)
    for how in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        kernels, plain = on_kernels(m)
        outs = [
            m.generate(ids, max_new_tokens=24, do_sample=False, **how, **{cache_argument(): cache})
            for cache in (kernels, plain)
        ]
        assert torch.equal(*outs), how


def test_saved_prefixes_go_on(tmp_path: Path) -> None:
    m = model("llama")
    ids = tokens(2, 260)
    kernels, plain = on_kernels(m)
    run(m, ids[:, :200], kernels, [190])
    kernels.save_prefix(tmp_path / "p")
    twin = copy.deepcopy(kernels)
    fresh = OscarCache(kernels.artifact, m.config, kernels=kernel_set()).load_prefix(tmp_path / "p")
    run(m, ids[:, :200], plain, [190])
    wanted = run(m, ids, plain, [30], past=200)
    for cache in (kernels, twin, fresh):
        close(run(m, ids, cache, [30], past=200), wanted)


def test_shaped_recipes_written_from_tables() -> None:
    """The codes are equally good, and nearly all the same."""
    m = model("llama")
    ids = tokens(1, 200)
    kernels, plain = on_kernels(m, "k2v2")
    wanted, got = run(m, ids, plain, [150]), run(m, ids, kernels, [150])
    same_pages(kernels, plain)
    assert float((got - wanted).norm() / wanted.norm()) < 0.02


def test_memory_counts_the_tables() -> None:
    m = model("llama")
    kernels, plain = on_kernels(m)
    for cache in (kernels, plain):
        run(m, tokens(1, 201), cache, [200])
    assert plain.memory()["tables"] == 0
    assert kernels.memory()["tables"] >= 2 * 4 * 3
    assert kernels.nbytes - plain.nbytes == kernels.memory()["tables"]
    kernels.reset()
    assert kernels.get_seq_length() == 0


# --- which kernels


def test_the_choice_is_named() -> None:
    m = model("llama")
    artifact = artifact_of(m, PLAIN, **SMALL)
    with pytest.raises(CacheError, match="cuda, triton, torch"):
        OscarCache(artifact, m.config, kernels="gpu")
    with pytest.raises(CacheError, match="or a KernelSet"):
        OscarCache(artifact, m.config, kernels=["cuda"])  # type: ignore[arg-type]
    with pytest.raises(OscarError, match="needs an NVIDIA GPU"):
        enable(m, artifact, kernels="cuda")
    enable(m, artifact, kernels="torch")
    cache = OscarCache(artifact, m.config)
    assert cache.describe()["kernel"] is None
    run(m, tokens(1, 5), cache, [5])
    assert cache.describe()["kernels"] == {"decode": "torch", "store": "torch", "prefill": "torch"}
    assert "kernels torch" in repr(cache)


def test_recipes_that_kernels_cannot_write_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    m = model("llama")
    ids = tokens(1, 160)
    registry._said.clear()
    kernels, plain = on_kernels(m, "naive")
    with caplog.at_level(logging.WARNING, "oscar_kv"):
        got = run(m, ids, kernels, [120])
    assert "store by torch" in caplog.text
    close(got, run(m, ids, plain, [120]))
    same_pages(kernels, plain)

# SPDX-License-Identifier: Apache-2.0
"""OscarCache of a fixed length: the same answers as a growing one, in one graph a decode step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from test_cache_kernels import PLAIN, SMALL, close, run
from tiny import artifact_of, model, tokens

from oscar_kv import OscarCache, enable
from oscar_kv.errors import CacheError
from oscar_kv.integrations.transformers.compat import cache_argument
from oscar_kv.kernels.torch_set import kernel_set


def caches(m: Any, length: int = 320, recipe: str = PLAIN, **static: Any) -> tuple[OscarCache, OscarCache]:
    """A fixed and a growing cache of an enabled model."""
    artifact = artifact_of(m, recipe, **SMALL)
    enable(m, artifact)
    return OscarCache(artifact, m.config, max_cache_len=length, **static), OscarCache(artifact, m.config)


@pytest.mark.parametrize(("family", "prompt"), [("llama", 20), ("qwen2", 150), ("gemma2", 150), ("gemma3_text", 150)])
def test_token_by_token_like_a_growing_cache(family: str, prompt: int) -> None:
    """From a prompt within the windows, and from one beyond; then a long chunk, then tokens again."""
    m = model(family)
    fixed, growing = caches(m)
    ids = tokens(2, prompt + 130)
    for past, chunks in ((0, [prompt]), (prompt + 60, [40])):
        stop = prompt + 60 if past == 0 else prompt + 130
        close(run(m, ids[:, :stop], fixed, chunks, past=past), run(m, ids[:, :stop], growing, chunks, past=past))
    assert int(fixed.get_seq_length()) == prompt + 130
    assert fixed.describe()["tokens"] == prompt + 130
    own, other = fixed.packed_layers[0].store, growing.packed_layers[0].store
    assert own.lengths == other.lengths
    for x, y in zip(own.state().values(), other.state().values(), strict=True):
        if x.dtype == torch.uint8:  # earlier layers may differ in the last bit
            assert float((x != y).double().mean()) < 1e-3
        else:
            assert torch.allclose(x, y, rtol=1e-4, atol=1e-4)


def test_shaped_recipes_and_those_of_others() -> None:
    for recipe in ("k2v2", "naive"):
        m = model("llama")
        fixed, growing = caches(m, recipe=recipe)
        ids = tokens(1, 210)
        close(run(m, ids, fixed, [140]), run(m, ids, growing, [140]))


def test_left_padding_of_the_prompt() -> None:
    m = model("llama")
    fixed, growing = caches(m)
    ids, mask = tokens(3, 200), torch.ones(3, 200, dtype=torch.long)
    mask[0, :31] = 0
    mask[2, :110] = 0
    got, wanted = run(m, ids, fixed, [130, 20], mask), run(m, ids, growing, [130, 20], mask)
    close(got[mask.bool()], wanted[mask.bool()])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_decode_step_is_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    m = model("llama")
    fixed, growing = caches(m)
    ids = tokens(2, 230)
    close(run(m, ids[:, :150], fixed, [150]), run(m, ids[:, :150], growing, [150]))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(m, backend=counter, fullgraph=True)
    wanted = run(m, ids, growing, [], past=150)
    got = run(compiled, ids, fixed, [], past=150)
    close(got, wanted)
    assert counter.frame_count == 1
    # Compiled steps leave the host behind; a chunk after them catches up, and another cache uses the same graph.
    more = tokens(2, 260)
    more[:, :230] = ids
    close(run(m, more, fixed, [30], past=230), run(m, more, growing, [30], past=230))
    again = OscarCache(fixed.artifact, m.config, max_cache_len=320)
    run(m, ids[:, :150], again, [150])
    close(run(compiled, ids, again, [], past=150), wanted)
    assert counter.frame_count == 1


def test_generate_compiles_by_itself() -> None:
    from transformers.generation.configuration_utils import CompileConfig

    torch._dynamo.reset()
    m = model("qwen2")
    fixed, growing = caches(m)
    ids, mask = tokens(2, 150), torch.ones(2, 150, dtype=torch.long)
    mask[1, :40] = 0
    how: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "attention_mask": mask}
    wanted = m.generate(ids, **how, **{cache_argument(): growing})
    config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    got = m.generate(ids, **how, compile_config=config, **{cache_argument(): fixed})
    assert torch.equal(got, wanted)
    assert m._compiled_call is not None
    fixed.reset()
    assert int(fixed.get_seq_length()) == 0
    again = m.generate(ids, **how, **{cache_argument(): fixed})
    assert torch.equal(again, wanted)


def test_a_full_cache_says_so(tmp_path: Path) -> None:
    """Steps that the host runs are refused; compiled ones answer with NaN, which generate and save_prefix find."""
    torch._dynamo.reset()
    m = model("llama")
    fixed, _ = caches(m, 160)
    ids = tokens(2, 300)
    assert run(m, ids[:, :160], fixed, [150]).isfinite().all()
    with pytest.raises(CacheError, match="room for 160 tokens a row and is full"):
        run(m, ids[:, :161], fixed, [], past=160)
    with pytest.raises(CacheError, match="room for 160 tokens"):
        run(m, ids[:, :180], fixed, [20], past=160)
    compiled = torch.compile(m, backend="eager", fullgraph=True)
    fixed.reset()
    run(m, ids[:, :159], fixed, [159])
    assert run(compiled, ids[:, :160], fixed, [], past=159).isfinite().all()
    assert run(compiled, ids[:, :161], fixed, [], past=160).isnan().all()
    with pytest.raises(CacheError, match="was full at 160 tokens"):
        fixed.save_prefix(tmp_path / "p")
    fixed.reset()
    assert run(m, ids[:, :160], fixed, [150]).isfinite().all()
    fixed.save_prefix(tmp_path / "p")
    other, _ = caches(m, 100)
    with pytest.raises(CacheError, match="room for 100 tokens"):
        run(m, ids[:, :101], other, [101])
    with pytest.raises(CacheError, match="holds 160 tokens a row, the cache has room for 100"):
        other.load_prefix(tmp_path / "p")
    assert run(m, tokens(1, 60), other, [50]).isfinite().all()


@pytest.mark.parametrize("compiles", [False, True])
def test_generate_beyond_the_end_is_an_error(compiles: bool) -> None:
    from transformers.generation.configuration_utils import CompileConfig

    torch._dynamo.reset()
    m = model("llama")
    fixed, _ = caches(m, 160)
    how: dict[str, Any] = {"do_sample": False, cache_argument(): fixed}
    if compiles:
        how["compile_config"] = CompileConfig(backend="eager", fullgraph=True, mode=None)
        how["compile_config"]._compile_all_devices = True
    assert m.generate(tokens(2, 150), max_new_tokens=11, **how).shape == (2, 161)
    fixed.reset()
    with pytest.raises(CacheError, match="full"):
        m.generate(tokens(2, 150), max_new_tokens=12, **how)


def test_what_a_step_cannot_follow_is_refused() -> None:
    m = model("llama")
    fixed, _ = caches(m)
    ids, mask = tokens(2, 160), torch.ones(2, 160, dtype=torch.long)
    mask[0, :9] = 0
    run(m, ids[:, :155], fixed, [150], mask)
    for wrong in (mask[:, :100], torch.cat([mask[:, :155], torch.tensor([[1], [0]])], 1)):
        with pytest.raises(CacheError, match="leaves out the new token 155"), torch.no_grad():
            m(ids[:, 155:156], attention_mask=wrong, **{cache_argument(): fixed})
    assert run(m, ids, fixed, [], mask, past=155).isfinite().all()
    half = model("llama", torch.bfloat16)
    enable(half, fixed.artifact)
    with pytest.raises(CacheError, match="keys are torch.bfloat16"):
        run(half, tokens(2, 161), fixed, [], past=160)
    for length in (True, 2.5, "64", 0):
        with pytest.raises(CacheError, match="max_cache_len"):
            OscarCache(fixed.artifact, m.config, max_cache_len=length)  # type: ignore[arg-type]


def test_memory_is_taken_at_once_and_kept() -> None:
    m = model("llama")
    fixed, _ = caches(m, 320)
    run(m, tokens(1, 70), fixed, [69])

    def where() -> list[int]:
        held = (layer.store for layer in fixed.packed_layers)
        return [x.data_ptr() for s in held for x in (s.pool.pages, s.sink_k, s.sink_v, s.ring_k, s.ring_v)]

    places = where()
    held = fixed.nbytes
    assert fixed.packed_layers[0].store.pool.pages.shape[0] == 320 // 64
    run(m, tokens(1, 300), fixed, [200], past=70)
    fixed.reset()
    run(m, tokens(1, 90), fixed, [89])
    assert where() == places
    assert fixed.memory()["pages"] + fixed.memory()["windows"] <= held


def test_what_a_fixed_cache_cannot_do_is_refused(tmp_path: Path) -> None:
    m = model("llama")
    fixed, _ = caches(m)
    run(m, tokens(1, 150), fixed, [140])
    assert fixed.is_compileable
    assert not fixed.is_croppable
    for use in (
        lambda: fixed.crop(-1),
        lambda: fixed.reorder_cache(torch.tensor([0])),
        lambda: fixed.batch_repeat_interleave(2),
        lambda: fixed.batch_select_indices(torch.tensor([0])),
    ):
        with pytest.raises(CacheError, match="fixed length"):
            use()
    with pytest.raises(CacheError, match="holds 1 rows"):
        run(m, tokens(2, 151), fixed, [], past=150)
    with pytest.raises(CacheError, match="at least 1"):
        OscarCache(fixed.artifact, m.config, max_cache_len=0)


def test_prefixes_move_between_fixed_and_growing(tmp_path: Path) -> None:
    m = model("llama")
    fixed, growing = caches(m)
    ids = tokens(1, 230)
    for cache in (fixed, growing):
        run(m, ids[:, :180], cache, [140])
    wanted = run(m, ids, growing, [], past=180)
    path = fixed.save_prefix(tmp_path / "p")
    for length in (None, 256):
        fresh = OscarCache(fixed.artifact, m.config, max_cache_len=length).load_prefix(path)
        close(run(m, ids, fresh, [], past=180), wanted)


def test_kernel_sets_of_tables() -> None:
    """As on a GPU: prompts and steps written by the store kernel."""
    m = model("llama")
    fixed, growing = caches(m, kernels=kernel_set())
    ids = tokens(2, 220)
    close(run(m, ids, fixed, [130, 30]), run(m, ids, growing, [130, 30]))


@pytest.mark.parametrize(("recipe", "dtype"), [(PLAIN, torch.float32), ("naive", torch.bfloat16)])
def test_without_kernels_a_gpu_gets_no_fixed_cache(
    recipe: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What asks the host in the middle of a step cannot be captured: an error at once, not at the first graph."""
    from oscar_kv.kernels import registry

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(registry, "has_nvrtc", lambda: True)
    monkeypatch.setattr(registry, "kernel_set", lambda device, wanted=None: kernel_set())
    m = model("llama")
    fixed, growing = caches(m, recipe=recipe)
    with pytest.raises(CacheError, match="needs kernels for decode and store"):
        fixed.serve(torch.device("cuda:0"), dtype)
    assert growing.serve(torch.device("cuda:0"), dtype).store == "torch"

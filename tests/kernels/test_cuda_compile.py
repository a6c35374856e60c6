# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels compile for every architecture they are meant for, and no register is spilled."""

from __future__ import annotations

import pytest
import torch

from oscar_kv.errors import OscarError
from oscar_kv.kernels.cuda.compiler import compile_cached, compile_source
from oscar_kv.kernels.cuda.spec import DecodeSpec
from oscar_kv.layout import PageLayout


def _nvrtc_missing() -> str:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:
        return f"NVRTC is not installed here ({type(error).__name__}): pip install 'oscar-kv[cuda]'"
    return ""


needs_nvrtc = pytest.mark.skipif(bool(_nvrtc_missing()), reason=_nvrtc_missing() or "-")
MAIN = [(PageLayout(128, 128, 2, 2), 4), (PageLayout(128, 128, 2, 2), 12), (PageLayout(256, 256, 2, 2), 8)]
MORE = [
    (PageLayout(128, 128, 4, 4), 8),
    (PageLayout(128, 128, 3, 3), 8),
    (PageLayout(64, 64, 2, 2), 4),
    (PageLayout(112, 112, 3, 2), 8),
]
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
EVERY = [(c, *x) for c in CAPABILITIES for x in MAIN] + [((9, 0), *x) for x in MORE]
QUICK = [((8, 0), *MAIN[0]), ((9, 0), *MAIN[0]), ((9, 0), *MAIN[1]), ((12, 0), *MAIN[0])]
CASES = [*QUICK, *(pytest.param(*x, marks=pytest.mark.slow) for x in EVERY if x not in QUICK)]


@needs_nvrtc
@pytest.mark.parametrize(("capability", "layout", "group"), CASES)
def test_no_spills(capability: tuple[int, int], layout: PageLayout, group: int) -> None:
    spec = DecodeSpec.choose(layout, group, torch.bfloat16, capability)
    for file, kernels in (
        ("prepare.cu", {"prepare_one", "prepare_many"}),
        ("decode.cu", {"decode"}),
        ("finish.cu", {"finish_one", "finish_some", "finish_many"}),
    ):
        usage = compile_source(file, spec.header, capability).usage
        for name, u in usage.items():
            print(f"sm_{capability[0]}{capability[1]} {layout} group {group} {name}: {u}")
            assert u.spill_bytes == 0, name
        assert set(usage) == kernels
    assert spec.shared_bytes <= spec.shared_limit


@needs_nvrtc
def test_cache_holds_what_was_compiled(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("OSCAR_KV_CACHE", str(tmp_path))
    spec = DecodeSpec.choose(PageLayout(64, 64, 2, 2), 1, torch.float16, (8, 0))
    first = compile_cached("finish.cu", spec.header, (8, 0))
    (file,) = (tmp_path / "cuda").iterdir()
    file.write_bytes(b"seen before")
    assert first[:4] == b"\x7fELF"
    assert compile_cached("finish.cu", spec.header, (8, 0)) == b"seen before"
    assert compile_cached("finish.cu", spec.header, (8, 6)) != b"seen before"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_shape_fits_shared_memory(capability: tuple[int, int]) -> None:
    for d in (64, 80, 96, 112, 128, 192, 256):
        for bits in ((1, 1), (2, 2), (3, 3), (4, 4)):
            for group in (1, 8, 16):
                spec = DecodeSpec.choose(PageLayout(d, d, *bits), group, torch.bfloat16, capability)
                assert spec.shared_bytes <= spec.shared_limit
                assert spec.heads * spec.head_blocks >= group


def test_what_cannot_be_served_is_refused() -> None:
    layout = PageLayout(128, 128, 2, 2)
    with pytest.raises(OscarError, match="compute capability"):
        DecodeSpec.choose(layout, 4, torch.bfloat16, (7, 5))
    with pytest.raises(OscarError, match="float32"):
        DecodeSpec.choose(layout, 4, torch.float32, (9, 0))
    with pytest.raises(OscarError, match="shared memory"):
        DecodeSpec.choose(layout, 4, torch.bfloat16, (8, 9), warps=16, stages=8)

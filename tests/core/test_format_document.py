# SPDX-License-Identifier: Apache-2.0
"""docs/format.md is a specification: pages written by its text alone are this package's pages, byte for byte."""

from __future__ import annotations

import hashlib
import json
import re

import numpy as np
import page_from_document as document
import pytest
import torch

from oscar_kv.artifact import Calibration, Metadata, ModelIdentity, WeightSample
from oscar_kv.geometry import LayerGeometry
from oscar_kv.layout import PageLayout, pack_codes, read_pages, write_pages
from oscar_kv.quantizer import Quantised
from oscar_kv.recipe import Recipe

FORMAT = document.VECTORS.parent / "format.md"
MANIFEST = json.loads((document.VECTORS / "manifest.json").read_text())


def quantised(code: list[list[int]], step: list[float], zero: list[float]) -> Quantised:
    return Quantised(torch.tensor(code, dtype=torch.uint8), torch.tensor(step).half(), torch.tensor(zero).half())


@pytest.mark.parametrize("case", document.CASES, ids=document.name_of)
def test_the_files_are_what_text_and_package_write(case: tuple[int, int, int, int]) -> None:
    stored, entry = (document.VECTORS / document.name_of(case)).read_bytes(), MANIFEST[document.name_of(case)]
    assert (len(stored), hashlib.sha256(stored).hexdigest()) == (entry["bytes"], entry["sha256"])
    assert stored[:16].hex() == entry["first_16"]
    code, meta = document.example(case)
    assert document.decode(case, stored) == (code, meta)  # the document's reader
    columns = list(zip(*meta, strict=True))
    layout = PageLayout(*case)
    k, v = quantised(code["k"], columns[0], columns[1]), quantised(code["v"], columns[2], columns[3])
    assert layout.page_bytes == len(stored)
    assert write_pages(layout, k, v).numpy().tobytes() == stored  # the package's writer
    for got, want in zip(
        read_pages(layout, torch.frombuffer(bytearray(stored), dtype=torch.uint8)), (k, v), strict=True
    ):
        assert torch.equal(got.code, want.code)
        assert torch.equal(got.step, want.step)
        assert torch.equal(got.zero, want.zero)


@pytest.mark.parametrize("d", range(16, 257, 16))
@pytest.mark.parametrize("side", ["k", "v"])
def test_every_plane_is_where_the_document_says(side: str, d: int) -> None:
    for bits in (1, 2, 4):
        t, i = 37, d - 3
        for token, dim in ((t, i), (0, 0), (63, d - 1), (8, 9), (t, 7)):
            code = torch.zeros(64, d, dtype=torch.uint8)
            code[token, dim] = 2**bits - 1
            data = pack_codes(code, side, bits).numpy()
            byte, bit = document.byte_and_bit(side, token, dim, d, bits)
            assert np.flatnonzero(data).tolist() == [byte]
            assert data[byte] == (2**bits - 1) << bit


def test_the_document_lists_the_vectors_and_every_header_field() -> None:
    text = FORMAT.read_text()
    for name, entry in MANIFEST.items():
        row = next(line for line in text.splitlines() if f"`{name}`" in line)
        assert str(entry["bytes"]) in row.replace(",", "")
        assert entry["first_16"] in row
        assert entry["sha256"][:16] in row
    assert set(MANIFEST) == {p.name for p in document.VECTORS.glob("*.bin")}
    for model in (Metadata, ModelIdentity, WeightSample, Calibration, LayerGeometry, Recipe):
        for field in model.model_fields:
            assert re.search(rf"`{field}`", text), f"docs/format.md does not name {model.__name__}.{field}"

# SPDX-License-Identifier: Apache-2.0
"""Shapes as they are asked for, bytes from the layout, and results files that hold what was measured so far."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oscar_kv.bench.model import compare
from oscar_kv.bench.report import Report, tidy
from oscar_kv.bench.shapes import PRESETS, DecodeShape, ModelShape, PrefillShape
from oscar_kv.errors import OscarError


def test_a_shape_is_parsed() -> None:
    found = DecodeShape.parse("q=64,kv=8,batch=4,context=8192,d=64,k=3,v=2")
    assert found == DecodeShape(64, 8, 64, 3, 2, 4, 8192)
    assert PrefillShape.parse("chunk=128").chunk == 128
    assert DecodeShape.parse("") == DecodeShape()


@pytest.mark.parametrize("text", ["heads=3", "q=", "q=4.5", "chunk=7", "q=30", "d=100", "k=5", "context=320"])
def test_what_cannot_be_measured_is_refused(text: str) -> None:
    with pytest.raises(OscarError):
        DecodeShape.parse(text)


def test_bytes_are_those_of_the_layout() -> None:
    s = DecodeShape(batch=1, context=98304)
    assert s.bytes == 8 * (72 * (98304 - 320) + 512 * 320)
    assert s.dense_bytes(2) == 8 * 512 * 98304
    assert s.dense_bytes(1) * 2 == s.dense_bytes(2)


def test_the_table_is_the_one_that_was_promised() -> None:
    asked = {(s.q_heads, s.batch, s.context) for s in PRESETS["table"]}
    assert asked >= {(q, b, 98304) for q in (32, 64, 96) for b in (8, 32)} | {(32, 1, 98304), (32, 128, 8192)}
    assert {(s.k_bits, s.v_bits) for s in PRESETS["others"]} >= {(4, 4), (2, 1), (3, 2), (3, 3)}
    assert {s.head_dim for s in PRESETS["others"]} >= {64, 256}


def test_qwen_has_its_eight_billion_parameters() -> None:
    assert ModelShape().weights == pytest.approx(8.19e9, rel=0.01)


def test_every_row_is_on_disk_when_it_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "results" / "decode.json"
    report = Report("decode", "cpu", file, copy=4.0)
    s = DecodeShape()
    report.add("oscar-cuda", s.row(), 0.02, s.bytes, error=1e-3)
    first = json.loads(file.read_text())
    assert len(first["rows"]) == 1
    assert first["rows"][0]["share"] == pytest.approx(s.bytes / 4.0e12 / 0.02e-3, rel=1e-4)
    assert "times_faster" not in first["rows"][0]
    report.add("sdpa-bf16", {**s.row(), "k_bits": 16, "v_bits": 16}, 0.1, s.dense_bytes(2))
    assert "times_faster_fa3" not in report.rows[0], "not measured"
    report.add("fa3-bf16", {**s.row(), "k_bits": 16, "v_bits": 16}, 0.2, s.dense_bytes(2))
    report.add("fa3-fp8", {**s.row(), "k_bits": 8, "v_bits": 8}, 0.05, s.dense_bytes(1))
    rows = json.loads(file.read_text())["rows"]
    assert rows[0]["times_faster"] == pytest.approx(5.0), "against the fastest BF16, and no FP8"
    assert rows[0]["fastest_bf16"] == "sdpa-bf16"
    assert rows[0]["times_faster_fa3"] == pytest.approx(10.0)
    meta = json.loads(file.read_text())["meta"]
    assert {"command", "commit", "date", "machine", "gpu", "versions", "seed", "copy_tb_s", "notes"} <= set(meta)
    assert meta["notes"].startswith("NO BENCHMARK")
    assert list(tmp_path.glob("results/*")) == [file]


def test_other_shapes_are_not_compared() -> None:
    report = Report("decode", "cpu", copy=4.0)
    report.add("fa3-bf16", DecodeShape(batch=8).row(), 0.7)
    row = report.add("oscar-cuda", DecodeShape(batch=1).row(), 0.02)
    assert "times_faster" not in row
    assert "times_faster_fa3" not in row


def test_json_has_no_infinities() -> None:
    assert tidy({"a": float("inf"), "b": [1.23456789, float("nan")], "c": 3}) == {
        "a": None,
        "b": [1.23457, None],
        "c": 3,
    }


def test_models_compare_at_their_own_largest_batches() -> None:
    rows = [
        {"op": "oscar-cuda", "tokens_per_s": 900.0, "cache_bytes_per_token": 70.0},
        {"op": "fa3-bf16", "tokens_per_s": 100.0, "cache_bytes_per_token": 500.0},
        {"op": "fa3-bf16", "tokens_per_s": 300.0, "cache_bytes_per_token": 490.0},
    ]
    compare(rows)
    assert rows[0]["memory_ratio"] == 7.0
    assert rows[0]["throughput_ratio"] == 3.0


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OscarError, match="--json"):
        Report("decode", "cpu", tmp_path / "file" / "x.json").save()

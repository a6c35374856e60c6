# SPDX-License-Identifier: Apache-2.0
"""Results files: the shape, what is refused, and merging of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oscar_kv.errors import OscarError
from oscar_kv.evaluation import results
from oscar_kv.evaluation.needles import Retrieval
from oscar_kv.evaluation.results import Meta, NeedleRow, QualityRow, Results, merge, needle_row, read, write

META = Meta(command="c", commit="abc", date="2026-01-01T00:00:00Z", machine="m", versions={"torch": "2"}, model="tiny")
FIELDS: dict[str, Any] = {
    "recipe": "k2v2", "k_bits": 2, "v_bits": 2, "dataset": "code", "context": 2048, "tokens": 8192, "kl": 0.05,
    "ppl": 3.4, "ppl_bf16": 3.38, "bpe": 5.25,
}  # fmt: skip


def test_round_trip_has_the_published_shape(tmp_path: Path) -> None:
    needle = needle_row(Retrieval("k2v2", 8192, [True, False, True]))
    path = write(tmp_path / "deep" / "q.json", META, [QualityRow(**FIELDS), needle])
    document = json.loads(path.read_text())
    assert set(document) == {"meta", "rows"}
    assert {
        "command",
        "commit",
        "date",
        "machine",
        "gpu",
        "versions",
        "model",
        "artifact_sha256",
        "seed",
        "notes",
    } == set(document["meta"])
    assert document["rows"][0] == FIELDS
    row = document["rows"][1]
    assert (row["task"], row["n"], row["right"]) == ("niah", 3, "101")
    assert row["ci95"] == [pytest.approx(0.20765, abs=1e-4), pytest.approx(0.93851, abs=1e-4)]
    assert [type(r) for r in read(path).rows] == [QualityRow, NeedleRow]


@pytest.mark.parametrize(
    ("change", "field"),
    [({"extra": 1}, "extra"), ({"kl": float("nan")}, "kl"), ({"k_bits": 0}, "k_bits"), ({"tokens": "many"}, "tokens")],
)
def test_bad_rows_are_refused_by_field(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    document = {"meta": META.model_dump(), "rows": [{**FIELDS, **change}]}
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(OscarError, match=rf"bad\.json.*{field}"):
        read(path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    for name in ("x.json", "none.json"):
        with pytest.raises(OscarError, match=name):
            read(tmp_path / name)


def test_merge_replaces_rows_and_refuses_another_measurement() -> None:
    first = Results(meta=META, rows=[QualityRow(**FIELDS), QualityRow(**{**FIELDS, "dataset": "prose"})])
    later = Results(meta=META.model_copy(update={"commit": "def"}), rows=[QualityRow(**{**FIELDS, "kl": 0.04})])
    both = merge([first, later])
    assert both.meta.commit == "def"
    assert [(r.dataset, r.kl) for r in both.rows if isinstance(r, QualityRow)] == [("code", 0.04), ("prose", 0.05)]
    other = Results(meta=META.model_copy(update={"model": "big"}), rows=[])
    with pytest.raises(OscarError, match="model"):
        merge([first, other])
    with pytest.raises(OscarError, match="nothing"):
        merge([])


def test_meta_of_a_process_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import platform
    import sys

    monkeypatch.setattr(sys, "argv", ["/some/where/oscar-kv", "eval", "/home/somebody/models/tiny", "--seed", "1"])
    meta = results.make_meta("tiny", seed=1)
    assert meta.command == "oscar-kv eval tiny --seed 1"
    assert platform.node() not in meta.machine or not platform.node()
    assert meta.gpu is None
    assert "torch" in meta.versions


def test_commit_outside_a_checkout_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSCAR_KV_COMMIT", raising=False)
    monkeypatch.setattr(results, "_git", lambda *a: None)
    assert results.commit() == "unknown"
    monkeypatch.setattr(results, "_git", lambda *a: "f00" if a[0] == "rev-parse" else " M file")
    assert results.commit() == "f00-dirty"
    monkeypatch.setenv("OSCAR_KV_COMMIT", "c0ffee")  # a copy may have a history that is not its own
    assert results.commit() == "c0ffee"

# SPDX-License-Identifier: Apache-2.0
"""Reports are one file that needs nothing else, and figures draw what they are given."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_kv.artifact import Artifact
from oscar_kv.errors import OscarError
from oscar_kv.evaluation import plots
from oscar_kv.evaluation.diagnostics import spread_of, summarise
from oscar_kv.evaluation.report import Facts, Picture, Section, Table, Verbatim, render, write

pytest.importorskip("matplotlib", reason="plots need the extra oscar-kv[demo]")
PNG = b"\x89PNG"


class Balanced(HTMLParser):
    """Fails on a tag that closes another one than it should."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_balanced_escaped_and_self_contained() -> None:
    parts = [
        "a < b & c", Table(("name", "value"), (("<i>", "1.5"), ("two", "2")), marked=(1,)), Picture(PNG, 'a "caption"'),
        Facts((("model", "x<y"),)), Verbatim("line 1\nline 2 </pre>"),
    ]  # fmt: skip
    text = render("Title & more", "sub", [Section("One", parts)])
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert "<i>" not in text
    assert "x&lt;y" in text
    assert "&lt;/pre&gt;" in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "<script" not in text
    assert "http" not in text
    assert base64.b64encode(PNG).decode() in text
    assert text.count('<tr class="mark">') == 1


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OscarError, match=r"report\.html"):
        write(tmp_path / "file" / "report.html", "t", "s", [])


def rows() -> list[dict[str, Any]]:
    kl = {"bf16": 0.0, "naive": 1.5, "k2v2": 0.012}
    return [{"recipe": r, "dataset": d, "kl": v, "bpe": 5.25} for r, v in kl.items() for d in ("code", "prose")]


def test_quality_bars_show_every_figure_but_bf16_worst_first() -> None:
    axis = plots.quality_bars(rows(), "t").axes[0]
    assert [label.get_text().split("\n")[0] for label in axis.get_yticklabels()] == ["naive", "k2v2"]
    assert sorted(round(p.get_width(), 4) for p in axis.patches) == [0.012, 0.012, 1.5, 1.5]
    with pytest.raises(OscarError, match="nothing to plot"):
        plots.quality_bars([r for r in rows() if r["recipe"] == "bf16"], "t")


def test_positions_start_where_they_are_said_to() -> None:
    line = plots.kl_by_position({"k2v2": [0.1, 0.2]}, bucket=100, first=512).axes[0].lines[0]
    assert list(line.get_xdata()) == [562, 662]
    assert list(line.get_ydata()) == [0.1, 0.2]


def test_spectra_need_an_error_weight(artifact_of: Callable[..., Artifact]) -> None:
    summary = summarise(artifact_of())
    figure = plots.spectra(summary)
    assert len(figure.axes[0].lines) == 1 + len(summary)
    with pytest.raises(OscarError, match="error weight"):
        plots.spectra(summarise(artifact_of().with_recipe("naive")))


def test_predicted_errors_and_centres_draw_each_layer(artifact: Artifact) -> None:
    summary = summarise(artifact)
    keys = {line.get_label(): line.get_ydata() for line in plots.predicted_errors(summary).axes[0].lines}
    assert list(keys["keys, error feedback"]) == pytest.approx([100 * (s.key_shaped or 0) for s in summary])
    grid = plots.centres({i: t.k.centre for i, t in artifact.layers.items()}, summary).axes[0].images[0].get_array()
    assert grid.shape == (4, 64)
    assert float(grid[0, 5]) == pytest.approx(float(artifact.layers[0].k.centre.reshape(-1)[5]))


def test_key_channels_and_the_overview_are_pngs(artifact: Artifact) -> None:
    x = torch.randn(1, 2, 300, 32) + artifact.layers[0].k.centre[:, None]
    figure = plots.key_channels(spread_of(x[0]), spread_of(artifact.layers[0].k.apply(x)[0]), 0, "layer 0")
    single = plots.png(figure)
    assert single.startswith(PNG)
    stacked = plots.overview([single, single])
    assert stacked.startswith(PNG)
    assert len(stacked) > len(single)

# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML file: headings, text, tables, figures as embedded PNG. No script, no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..errors import OscarError

_STYLE = """
:root { --ink:#1d2733; --soft:#5b6875; --line:#dde3ea; --page:#f5f7f9; --card:#fff; --mark:#e8f1fb; --accent:#1f6fb5; }
* { box-sizing:border-box; }
body { margin:0; background:var(--page); color:var(--ink); font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif; }
main { max-width:1080px; margin:0 auto; padding:2.5rem 1.25rem 4rem; }
h1 { font-size:1.9rem; line-height:1.2; margin:0 0 .3rem; }
header p { color:var(--soft); margin:.2rem 0 1.6rem; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:1.2rem 1.5rem 1.4rem; margin:0 0 1.3rem; }
h2 { font-size:1.2rem; margin:0 0 .5rem; }
p { margin:.45rem 0; }
.wide { overflow-x:auto; }
table { border-collapse:collapse; width:100%; margin:.8rem 0 .2rem; font-variant-numeric:tabular-nums; font-size:.93rem; }
th, td { padding:.36rem .7rem; border-bottom:1px solid var(--line); text-align:right; white-space:nowrap; }
th { color:var(--soft); font-weight:600; }
th:first-child, td:first-child { text-align:left; }
tr.mark td { background:var(--mark); font-weight:600; }
figure { margin:1rem 0 .2rem; }
figure img { width:100%; height:auto; display:block; }
figcaption { color:var(--soft); font-size:.9rem; margin-top:.35rem; }
pre { white-space:pre-wrap; background:var(--page); border:1px solid var(--line); border-radius:8px; padding:.8rem 1rem; margin:.5rem 0; font:.88rem/1.5 ui-monospace,SFMono-Regular,Menlo,monospace; }
dl { display:grid; grid-template-columns:max-content 1fr; gap:.15rem 1.2rem; margin:.4rem 0; }
dt { color:var(--soft); } dd { margin:0; overflow-wrap:anywhere; }
"""  # noqa: E501


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; the rows whose index is in ``marked`` stand out."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Sequence[int] = ()

    def html(self) -> str:
        head = "".join(f"<th>{escape(c)}</th>" for c in self.columns)
        body = []
        for i, row in enumerate(self.rows):
            cells = "".join(f"<td>{escape(c)}</td>" for c in row)
            body.append(f'<tr class="mark">{cells}</tr>' if i in self.marked else f"<tr>{cells}</tr>")
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


@dataclass(frozen=True)
class Picture:
    """A PNG with its caption."""

    png: bytes
    caption: str

    def html(self) -> str:
        data = base64.b64encode(self.png).decode("ascii")
        alt = escape(self.caption, quote=True)
        image = f'<img alt="{alt}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{escape(self.caption)}</figcaption></figure>"


@dataclass(frozen=True)
class Facts:
    """Names and values, one a line."""

    pairs: Sequence[tuple[str, str]]

    def html(self) -> str:
        return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in self.pairs) + "</dl>"


@dataclass(frozen=True)
class Verbatim:
    """Text shown as it is, line breaks included."""

    text: str

    def html(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


Part = str | Table | Picture | Facts | Verbatim


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; a plain string is a paragraph."""

    title: str
    parts: Sequence[Part]

    def html(self) -> str:
        inner = "".join(f"<p>{escape(p)}</p>" if isinstance(p, str) else p.html() for p in self.parts)
        return f"<section><h2>{escape(self.title)}</h2>{inner}</section>"


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The whole page as text."""
    body = "".join(section.html() for section in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main><header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>{body}</main></body></html>\n"
    )


def write(path: str | Path, title: str, subtitle: str, sections: Sequence[Section]) -> Path:
    """Write the page. Raises OscarError if the file cannot be written."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(title, subtitle, sections), encoding="utf-8")
    except OSError as error:
        raise OscarError(f"{path}: the report cannot be written ({error})") from error
    return path

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oscar_kv.calibration.data import Document, chunks, describe, load_texts
from oscar_kv.errors import CalibrationError


class Words:
    """A tokenizer: numbers separated by blanks; its chat template marks the turns."""

    chat_template: str | None = "yes"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(w) for w in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize
        return " ".join(f"{900 if m['role'] == 'user' else 901} {m['content']}" for m in messages)


def counting(start: int, n: int, group: str = "", name: str = "t") -> Document:
    return Document(name, " ".join(str(start + i) for i in range(n)), group=group)


def firsts(pieces: list[Any]) -> list[tuple[int, int]]:
    return [(int(p[0]), len(p)) for p in pieces]


def test_first_chunk_of_every_document_before_the_second_of_any() -> None:
    docs = [counting(0, 30), counting(100, 30), counting(200, 30)]
    assert firsts(chunks(docs, Words(), 40, 10)) == [(0, 10), (100, 10), (200, 10), (10, 10)]


def test_kinds_take_turns() -> None:
    docs = [counting(0, 30, "code"), counting(100, 30, "code"), counting(200, 30, "prose"), counting(300, 30, "prose")]
    assert firsts(chunks(docs, Words(), 20, 10)) == [(0, 10), (200, 10)]


def test_short_documents_are_joined() -> None:
    docs = [counting(10 * i, 4) for i in range(6)]
    assert firsts(chunks(docs, Words(), 24, 10)) == [(0, 10), (22, 10), (50, 4)]


def test_the_last_chunk_is_cut_to_the_budget() -> None:
    assert firsts(chunks([counting(0, 100)], Words(), 25, 10)) == [(0, 10), (10, 10), (20, 5)]


def test_too_little_text_warns() -> None:
    with pytest.warns(UserWarning, match="hold 15 tokens, 100 were asked for"):
        assert firsts(chunks([counting(0, 15)], Words(), 100, 10)) == [(0, 10), (10, 5)]


def test_bad_sizes() -> None:
    with pytest.raises(CalibrationError, match="chunk=0"):
        chunks([counting(0, 15)], Words(), 10, 0)


def test_chat_template() -> None:
    talk = Document("c", messages=({"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3"}))
    plain = counting(5, 2)
    (piece,) = chunks([talk, plain], Words(), 8, 8, chat_template=True)
    assert piece.tolist() == [900, 1, 2, 901, 3, 900, 5, 6]
    with pytest.raises(CalibrationError, match="--chat-template"):
        chunks([talk], Words(), 8, 8)
    without = Words()
    without.chat_template = None
    with pytest.raises(CalibrationError, match="no chat template"):
        chunks([plain], without, 8, 8, chat_template=True)


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.py.gz").write_bytes(gzip.compress(b"two"))
    rows = [{"text": "three"}, {"messages": [{"role": "user", "content": "four"}]}]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "ignored.bin").write_bytes(b"\xff\xfe")
    documents = load_texts(tmp_path)
    assert [d.text for d in documents] == ["one", "two", "three", ""]
    assert documents[3].messages[0]["content"] == "four"
    assert describe(tmp_path / "a.txt", documents[:1]) == "a.txt (1 document)"
    assert str(tmp_path) not in describe(tmp_path, documents)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"\xff\xfe\xfa", "UTF-8"),
        ("a.txt.gz", b"not gzip", "not readable"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2: not JSON"),
        ("a.jsonl", b'{"content": "x"}', 'line 1: needs a field "text"'),
        ("a.jsonl", b"[1]", 'line 1: needs a field "text"'),
        ("a.jsonl", b'{"messages": ["hi"]}', "messages"),
        ("a.pdf", b"%PDF", "cannot read .pdf"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=says) as error:
        load_texts(path)
    assert name in str(error.value)


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no such file"):
        load_texts(tmp_path / "none.txt")
    with pytest.raises(CalibrationError, match="no such file"):
        load_texts("none.jsonl")
    with pytest.raises(CalibrationError, match="built-in texts are builtin, builtin:code"):
        load_texts("builtin:poems")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CalibrationError, match="in this folder"):
        load_texts(tmp_path / "empty")


def test_a_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module = ModuleType("datasets")

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return iter([{"text": "one"}, {"text": ""}, {"text": "two"}])

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert [d.text for d in load_texts("org/name:config")] == ["one", "two"]
    assert calls == [(("org/name", "config"), {"split": "train", "streaming": True})]
    module.load_dataset = lambda *a, **k: iter([{"question": "x"}])  # type: ignore[attr-defined]
    with pytest.raises(CalibrationError, match='rows have question, not "text"'):
        load_texts("org/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CalibrationError, match="pip install datasets"):
        load_texts("org/name")


def test_builtin_texts() -> None:
    texts = pytest.importorskip("oscar_kv.demo.texts", reason="the demo's texts are not there")
    code, prose, both = load_texts("builtin:code"), load_texts("builtin:prose"), load_texts("builtin")
    assert code and prose and len(both) == len(code) + len(prose)
    assert {d.text for d in code} == {t.text for t in texts.load("code", "calibration")}

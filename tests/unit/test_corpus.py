"""The corpus of the quickstart: enough text, repeatable, stable split."""

from __future__ import annotations

from pathlib import Path

import pytest

from egmla_megatron.data.corpus import MIN_CORPUS_BYTES, Document, collect_stdlib, split_documents
from egmla_megatron.errors import UserError


def test_this_interpreter_has_enough_text() -> None:
    documents = collect_stdlib()
    names = [document.name for document in documents]
    assert sum(document.bytes for document in documents) >= MIN_CORPUS_BYTES
    assert names == sorted(set(names))
    assert "json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name or "/test/" in f"/{name}"]
    train, valid = split_documents(documents)
    assert {document.name for document in train}.isdisjoint(document.name for document in valid)
    assert len(train) + len(valid) == len(documents)


def make_files(root: Path) -> None:
    files = {
        "b.py": b"print('b')\n",
        "a/one.py": b"'''doc'''\n",
        "a/copy.py": b"print('b')\n",
        "a/latin.py": b"# \xe9\n",
        "a/empty.py": b"\n",
        "a/table.py": b"0x10, 0x11, 0x12\n" * 9,
        "a/tests/t.py": b"x = 1\n",
        "site-packages/p.py": b"y = 2\n",
        "a/data.bin": b"text\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_what_is_collected(tmp_path: Path) -> None:
    make_files(tmp_path)
    documents = collect_stdlib(tmp_path, min_bytes=1)
    # a/copy.py comes first in order, so b.py is the repetition
    assert [document.name for document in documents] == ["a/copy.py", "a/one.py"]
    assert documents[1].text == "'''doc'''\n"


def test_too_little_text(tmp_path: Path) -> None:
    make_files(tmp_path)
    with pytest.raises(UserError, match=r"corpus: got 21 bytes of text .* needed 5,000,000"):
        collect_stdlib(tmp_path)


def test_split_is_stable_when_documents_are_added() -> None:
    documents = [Document(f"file{number}.py", "x") for number in range(400)]
    train, valid = split_documents(documents[::2], valid_share=0.1)
    more_train, more_valid = split_documents(documents, valid_share=0.1)
    assert set(train) <= set(more_train) and set(valid) <= set(more_valid)
    assert 20 <= len(more_valid) <= 60


def test_a_split_without_a_side_is_refused() -> None:
    with pytest.raises(UserError, match="got 1 training, 0 validation"):
        split_documents([Document("b.py", "x")], valid_share=0.0001)
    with pytest.raises(UserError, match="valid_share: got 1"):
        split_documents([], valid_share=1)

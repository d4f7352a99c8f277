"""Real text from the machine itself: sources and documentation of the running interpreter's standard library.

One document per file, in sorted order, so that the same interpreter always gives the same corpus.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from egmla_megatron.errors import UserError

__all__ = ["MIN_CORPUS_BYTES", "Document", "collect_stdlib", "split_documents"]

MIN_CORPUS_BYTES = 5_000_000
_SUFFIXES = frozenset({".py", ".txt", ".rst"})
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_TABLE_SHARE = 0.3  # a file with a larger share of digits and escapes is a table, not text
_TABLE_CHARS = "0123456789\\"


@dataclass(frozen=True)
class Document:
    """One file: its path below the library's folder, with slashes, and its text."""

    name: str
    text: str

    @property
    def bytes(self) -> int:
        """Length of the text in UTF-8."""
        return len(self.text.encode("utf-8"))


def _is_table(text: str) -> bool:
    return sum(map(text.count, _TABLE_CHARS)) > _TABLE_SHARE * len(text)


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*"), key=lambda found: found.relative_to(root).as_posix()):
        folders = path.relative_to(root).parts[:-1]
        if path.suffix in _SUFFIXES and not _SKIPPED_FOLDERS.intersection(folders) and path.is_file():
            yield path


def collect_stdlib(root: Path | None = None, *, min_bytes: int = MIN_CORPUS_BYTES) -> list[Document]:
    """All text files below `root` (default: the running interpreter's standard library), sorted by name.

    Left out: installed packages, tests, files that are no UTF-8, empty files, tables of numbers and repeated contents.
    UserError when less than min_bytes of text is found.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    documents: list[Document] = []
    seen: set[bytes] = set()
    for path in _files(root):
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue  # sources in other encodings exist to test decoders
        if digest in seen or not text.strip() or _is_table(text):
            continue
        seen.add(digest)
        documents.append(Document(path.relative_to(root).as_posix(), text))
    found = sum(document.bytes for document in documents)
    if found < min_bytes:
        raise UserError(
            f"corpus: got {found:,} bytes of text below {root}, needed {min_bytes:,}; use a Python that is installed "
            "with its standard library as files (.py), or point data.train to a data set of your own"
        )
    return documents


def split_documents(
    documents: Iterable[Document], *, valid_share: float = 0.03
) -> tuple[list[Document], list[Document]]:
    """(train, validation) by the hash of each document's name: a document stays on its side when others are added."""
    if not 0 < valid_share < 1:
        raise UserError(f"valid_share: got {valid_share}, allowed above 0 and below 1")
    train: list[Document] = []
    valid: list[Document] = []
    for document in documents:
        digest = hashlib.sha256(document.name.encode("utf-8")).digest()
        draw = int.from_bytes(digest[:8], "big") / 2**64
        (valid if draw < valid_share else train).append(document)
    if not train or not valid:
        raise UserError(f"corpus: got {len(train)} training, {len(valid)} validation documents, needed both; add text")
    return train, valid

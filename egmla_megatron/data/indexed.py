"""Writes PREFIX.bin and PREFIX.idx in megatron-core's format, and the manifest PREFIX.json.

All three are written under temporary names and renamed when complete, the manifest last. `verify_prefix` (in
data/verify.py, offered here too) checks them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from egmla_megatron.data.index_file import id_dtype
from egmla_megatron.data.tokenizer import Tokenizer
from egmla_megatron.data.verify import MANIFEST_FORMAT, DatasetInfo, sha256_of, verify_prefix
from egmla_megatron.errors import UserError

__all__ = ["DatasetInfo", "move_into_place", "verify_prefix", "write_texts", "write_tokens"]


def write_texts(
    prefix: str | Path,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    source: str,
    total: int | None = None,
) -> dict[str, Any]:
    """Tokenizes texts (one document each, an end-of-document id behind each) and writes the data set.

    source: one line that says where the text is from. total: number of texts, for the progress bar.
    Returns the manifest.
    """

    def documents() -> Iterator[list[int]]:
        for text in texts:
            if text:
                yield [*tokenizer.encode(text), tokenizer.eod]

    return write_tokens(
        prefix,
        documents(),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod,
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        source=source,
        total=total,
    )


def write_tokens(
    prefix: str | Path,
    documents: Iterable[Sequence[int] | np.ndarray],
    *,
    vocab_size: int,
    eod_id: int,
    tokenizer: str,
    tokenizer_sha256: str,
    source: str,
    total: int | None = None,
) -> dict[str, Any]:
    """Writes documents of token ids, streaming; every id must be below vocab_size. Returns the manifest.

    The end-of-document id is not appended here. UserError for ids out of range and for an empty data set.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from egmla_megatron.progress import Bar

    dtype = id_dtype(vocab_size)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    partial = {suffix: Path(f"{prefix}.{suffix}.partial-{os.getpid()}") for suffix in ("bin", "idx", "json")}
    count = {"tokens": 0, "documents": 0}
    try:
        builder = IndexedDatasetBuilder(str(partial["bin"]), dtype=dtype.type)  # it wants the class
        with builder.data_file, Bar(documents, desc=f"writing {Path(prefix).name}", total=total, unit="doc") as bar:
            for number, document in enumerate(bar):
                ids = _checked_ids(document, number, vocab_size)
                builder.add_document(ids, [len(ids)])
                count["tokens"] += len(ids)
                count["documents"] += 1
        if not count["documents"]:
            raise UserError(f"{prefix}: got no documents, expected at least one; check the source of the text")
        builder.finalize(str(partial["idx"]))
        manifest = {
            "format": MANIFEST_FORMAT,
            **count,
            "vocab_size": vocab_size,
            "dtype": dtype.name,
            "eod_id": eod_id,
            "tokenizer": tokenizer,
            "tokenizer_sha256": tokenizer_sha256,
            "source": source,
            "sha256": {suffix: sha256_of(partial[suffix]) for suffix in ("bin", "idx")},
            "bytes": {suffix: partial[suffix].stat().st_size for suffix in ("bin", "idx")},
        }
        partial["json"].write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        move_into_place(str(prefix), partial)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return manifest


def _checked_ids(document: Sequence[int] | np.ndarray, number: int, vocab_size: int) -> np.ndarray:
    """The document as int64; conversion to uint16 would wrap ids that do not fit without a word."""
    ids = np.asarray(document, dtype=np.int64)
    if ids.ndim != 1 or not len(ids):
        raise UserError(f"document {number}: got shape {ids.shape}, expected a row of ids; drop empty documents")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UserError(f"document {number}: got id {bad}, allowed 0 to {vocab_size - 1}; use the matching tokenizer")
    return ids


def move_into_place(prefix: str, partial: dict[str, Path]) -> None:
    """Renames partial[bin, idx, json] to PREFIX.*.

    Old manifest and index go first, so that no moment shows a new .bin under an old index.
    """
    for suffix in ("json", "idx"):
        Path(f"{prefix}.{suffix}").unlink(missing_ok=True)
    for suffix in ("bin", "idx", "json"):
        partial[suffix].rename(f"{prefix}.{suffix}")

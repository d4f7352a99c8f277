"""Inputs and runs of the preprocessor for its tests."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from egmla_megatron.preprocess import plan
from egmla_megatron.preprocess.command import preprocess
from egmla_megatron.preprocess.options import Options

VOCAB, EOS = 100, 99
PLAIN: dict[str, Any] = {"vocab_size": VOCAB, "eos_id": EOS, "shuffle": False, "validation_fraction": 0.0}


def documents(count: int, seed: int = 0, vocab: int = VOCAB - 1) -> list[list[int]]:
    """Random documents of 1 to 40 ids, without an end-of-document id."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(draw.randrange(1, 41))] for _ in range(count)]


def write_jsonl(path: Path, rows: Sequence[Any], column: str = "tokens", **more: Sequence[Any]) -> str:
    """One object per line, compressed as the name says."""
    lines = [json.dumps({column: row, **{key: more[key][i] for key in more}}) for i, row in enumerate(rows)]
    return write_lines(path, lines)


def write_lines(path: Path, lines: Sequence[str]) -> str:
    """The lines, compressed as the name says."""
    raw = "".join(f"{line}\n" for line in lines).encode()
    if path.suffix == ".gz":
        raw = gzip.compress(raw)
    elif path.suffix == ".zst":
        raw = pa.Codec("zstd").compress(raw, asbytes=True)
    path.write_bytes(raw)
    return str(path)


def write_parquet(path: Path, rows: Any, column: str = "tokens", group: int = 7, **more: Any) -> str:
    """A parquet file with row groups of `group` rows; `rows` a list or an Arrow array."""
    array = rows if isinstance(rows, pa.Array) else pa.array(rows)
    pq.write_table(pa.table({column: array, **more}), path, row_group_size=group, write_page_checksum=True)
    return str(path)


def run(output: Path, *inputs: str, **options: Any) -> dict[str, Any]:
    """Preprocesses with PLAIN and `options` over it; returns the manifest."""
    preprocess(Options(inputs=inputs, output=output, **{**PLAIN, **options}))
    manifest: dict[str, Any] = json.loads(Path(f"{output}.json").read_text())
    return manifest


def stored(prefix: Path, dtype: Any = np.uint16) -> list[list[int]]:
    """The documents of a data set, by its index."""
    raw = Path(f"{prefix}.idx").read_bytes()
    count = int.from_bytes(raw[18:26], "little")
    lengths = np.frombuffer(raw, "<i4", count, 34)
    ids = np.fromfile(f"{prefix}.bin", dtype)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def ended(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each with one end-of-document id behind it."""
    return [[*row, EOS] for row in rows]


@contextmanager
def parts_of(size: int) -> Iterator[None]:
    """Parts of about `size` input bytes instead of 8 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_MIN_PART", size)
        yield

"""One part: its slices read, encoded and written. The .json comes last and makes it complete.

FOLDER/00012.bin tokens, 00012.npz arrays per document, 00012.json counts.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from egmla_megatron.preprocess import read_hub, read_jsonl, read_parquet, read_text
from egmla_megatron.preprocess.columns import UnreadableError
from egmla_megatron.preprocess.disk import writing_to
from egmla_megatron.preprocess.encode import Documents, Encoder
from egmla_megatron.preprocess.plan import Part, Plan, Slice
from egmla_megatron.preprocess.prefetch import prefetched
from egmla_megatron.preprocess.rows import Ledger, TextRows, TokenRows

__all__ = ["Report", "part_file", "read_record", "write_part"]

Progress = Callable[[int, int], None]  # input bytes done, tokens written; of this part so far
Report = Callable[[int, int, int], None]  # the same behind the part's number


def part_file(folder: Path, number: int, suffix: str) -> Path:
    """FOLDER/00012.SUFFIX"""
    return folder / f"{number:05}.{suffix}"


def read_record(folder: Path, number: int) -> dict[str, Any] | None:
    """The counts of a complete part, None when it is not there."""
    path = part_file(folder, number, "json")
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def write_part(
    plan: Plan, part: Part, folder: Path, encoder: Encoder, progress: Progress, *, ahead: bool = True
) -> None:
    """Writes the part's three files under temporary names and renames them. UserError when the disk cannot take it.

    ahead: read in a thread of its own, beside encoding.
    """
    temporary = {
        suffix: part_file(folder, part.number, f"{suffix}.{socket.gethostname()}-{os.getpid()}.tmp")
        for suffix in _SUFFIXES
    }
    try:
        with writing_to(folder):
            with temporary["bin"].open("wb", buffering=1 << 20) as out:
                arrays, record = _convert(plan, part, encoder, out, progress, ahead)
            with temporary["npz"].open("wb") as stream:
                np.savez(stream, allow_pickle=False, **arrays)
            temporary["json"].write_text(json.dumps(record) + "\n", encoding="utf-8")
            for suffix in _SUFFIXES:
                temporary[suffix].rename(part_file(folder, part.number, suffix))
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


_SUFFIXES = ("bin", "npz", "json")


def _convert(
    plan: Plan, part: Part, encoder: Encoder, out: BinaryIO, progress: Progress, ahead: bool
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    encoder.seen_V[:] = False
    collected: list[Documents] = []
    record: dict[str, Any] = {"part": part.number, "sources": {}, "examples": []}
    done_bytes = tokens = 0
    for piece in part.slices:
        ledger = Ledger(plan.on_error)
        before = tokens
        found = _read(plan, piece, ledger)
        for rows in prefetched(found) if ahead else found:
            documents = encoder.encode(rows, ledger)
            out.write(documents.tokens_T)
            tokens += len(documents.tokens_T)
            collected.append(_without_tokens(documents))
            # Bytes within a slice are estimated from tokens (4 bytes each); the slice's end is exact.
            progress(done_bytes + min(piece.bytes, 4 * (tokens - before)), tokens)
        done_bytes += piece.bytes
        counts = record["sources"].setdefault(str(piece.source), {})
        for key, value in ledger.counts.items():
            counts[key] = counts.get(key, 0) + value
        record["examples"] += ledger.examples
    progress(done_bytes, tokens)
    record.update(tokens=tokens, documents=sum(len(d.lengths_D) for d in collected))
    return _arrays(collected, encoder.seen_V), record


def _without_tokens(documents: Documents) -> Documents:
    return Documents(documents.tokens_T[:0], documents.lengths_D, documents.hashes_D2, documents.clusters_D)


def _arrays(collected: list[Documents], seen_V: np.ndarray) -> dict[str, np.ndarray]:
    def joined(arrays: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
        return np.concatenate([empty, *arrays])

    return {
        "lengths": joined([d.lengths_D for d in collected], np.empty(0, np.int64)),
        "hashes": joined([d.hashes_D2 for d in collected], np.empty((0, 2), np.uint64)),
        "clusters": joined([d.clusters_D for d in collected], np.empty(0, np.int64)),
        "seen": np.packbits(seen_V),
    }


def _read(plan: Plan, piece: Slice, ledger: Ledger) -> Iterator[TokenRows | TextRows]:
    source = plan.sources[piece.source]
    name, kind, column, cluster = source.name, source.kind, source.column, source.cluster_column
    try:
        if source.format == "parquet":
            yield from read_parquet.read_groups(name, kind, column, cluster, piece.start, piece.stop, ledger)
        elif source.format == "jsonl":
            yield from read_jsonl.read_lines(name, kind, column, cluster, piece.start, piece.stop or None, ledger)
        elif source.format == "txt":
            yield from read_text.read_file(name, ledger)
        else:
            shards = len(source.pieces)
            for shard in range(piece.start, piece.stop):
                yield from read_hub.read_shard(name, kind, column, cluster, shard, shards, ledger)
    except UnreadableError as error:  # readable when the run was planned, not any more
        ledger.fault(name, str(error))

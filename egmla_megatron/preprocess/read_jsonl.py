"""Rows of jsonl files, plain, gzip or zstd: ids through orjson into one array, text as Python strings."""

from __future__ import annotations

import gzip
import io
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa

from egmla_megatron.preprocess.columns import CLUSTER, Columns, Kind, UnreadableError, choose_column
from egmla_megatron.preprocess.rows import NO_CLUSTER, Ledger, TextRows, TokenRows

__all__ = ["inspect", "open_lines", "read_lines"]

_BATCH_IDS = 1 << 20  # ids handed on at a time
_BATCH_CHARS = 1 << 20  # characters handed on at a time
_BUFFER = 1 << 20  # bytes
_STREAM_ERRORS = (OSError, EOFError, zlib.error, pa.ArrowException)  # what a damaged gzip or zstd stream raises


def open_lines(path: Path) -> BinaryIO:
    """The file's decompressed bytes, buffered."""
    if path.name.endswith(".gz"):
        return io.BufferedReader(gzip.open(path), _BUFFER)
    if path.name.endswith(".zst"):
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), _BUFFER)
    return path.open("rb", buffering=_BUFFER)


def inspect(path: Path, columns: Columns) -> tuple[Kind, str, str]:
    """(kind, column, cluster column) from the first row that is not blank, can be read and has a value without holes.

    Lines that cannot be read are faults of their own when the rows are read; only a file of nothing else is unreadable.
    """
    damaged, count = "", 0
    try:
        with open_lines(path) as lines:
            for number, line in enumerate(lines, 1):
                count += bool(line.strip())
                row = _parse(line) if line.strip() else {}
                if isinstance(row, str):
                    damaged = damaged or f"line {number}: {row}"
                    continue
                if any(type(value) is list and None in value for value in map(row.get, (columns.tokens, columns.text))):
                    damaged = damaged or f"line {number}: got a list with null, expected whole numbers"
                    continue
                values = {key: _type_of(value) for key, value in row.items() if value is not None and value != []}
                if values.keys() & {columns.tokens, columns.text}:
                    return choose_column(str(path), values, columns)
                if row and not row.keys() & {columns.tokens, columns.text}:
                    return choose_column(str(path), dict.fromkeys(row, ""), columns)  # raises: neither is there
    except _STREAM_ERRORS as error:
        raise UnreadableError(f"{path}: cannot be read ({error})") from error
    if not damaged:
        raise UnreadableError(f"{path}: got no row with a value, expected at least one")
    if count == 1:
        raise UnreadableError(f"{path}, {damaged}; it is the only line")
    raise UnreadableError(f"{path}: got no usable row in {count:,} lines, expected at least one; the first, {damaged}")


def _parse(line: bytes) -> dict[str, Any] | str:
    """The row, or what is wrong with the line."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"not valid JSON (column {error.colno}: {error.msg})"
    return row if isinstance(row, dict) else f"got a JSON {type(row).__name__}, expected an object"


def _type_of(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        kinds = {type(item).__name__ for item in value}
        return "ids" if kinds == {"int"} else f"a list of {', '.join(sorted(kinds))}"
    return type(value).__name__


class _Batch:
    """Rows collected until there are enough to hand on."""

    def __init__(self) -> None:
        self.ids = array("q")
        self.lengths: list[int] = []
        self.texts: list[str] = []
        self.chars = 0
        self.clusters: list[int] = []
        self.numbers: list[int] = []  # line numbers, from 1 within the piece

    @property
    def full(self) -> bool:
        return len(self.ids) >= _BATCH_IDS or self.chars >= _BATCH_CHARS


def read_lines(
    path: str, kind: Kind, column: str, cluster: str, start: int, stop: int | None, ledger: Ledger
) -> Iterator[TokenRows | TextRows]:
    """Batches of the lines that begin in the bytes start to stop - 1 of the (decompressed) file; None: to its end.

    cluster: name of the cluster column, "": the first row has none, so what others have must not be a number.
    """
    batch, number, position = _Batch(), 0, start
    try:
        with open_lines(Path(path)) as lines:
            if start:
                lines.seek(start - 1)
                position += len(lines.readline()) - 1
            while stop is None or position < stop:
                line = lines.readline()
                if not line:
                    break
                number, position = number + 1, position + len(line)
                problem = _add(batch, line, number, kind, column, bool(cluster), ledger)
                if problem:
                    ledger.fault(_Lines(path, start)(number), problem)
                if batch.full:
                    yield _rows(batch, kind, path, start)
                    batch = _Batch()
    except _STREAM_ERRORS as error:
        ledger.fault(f"{_Lines(path, start)(number)} and what follows", f"cannot be read ({error})")
    if batch.numbers:
        yield _rows(batch, kind, path, start)


def _add(
    batch: _Batch, line: bytes, number: int, kind: Kind, column: str, strict_clusters: bool, ledger: Ledger
) -> str:
    """Takes one line in; returns what is wrong with it, or nothing."""
    if not line.strip():
        return ""
    ledger.counts["rows"] += 1
    row = _parse(line)
    if isinstance(row, str):
        return row
    number_of_cluster = row.get(CLUSTER)
    if number_of_cluster is None or (not strict_clusters and type(number_of_cluster) is not int):
        number_of_cluster = NO_CLUSTER
    elif type(number_of_cluster) is not int or not NO_CLUSTER < number_of_cluster < 2**63:
        return f"{CLUSTER!r} holds {number_of_cluster!r}, expected a whole number of at most 63 bits"
    if column not in row:
        return f"got keys {', '.join(row) or 'none'}, expected {column!r}"
    value = row[column]
    if value is None:
        ledger.counts["null"] += 1
        return ""
    if kind == "text":
        if not isinstance(value, str):
            return f"{column!r} holds {_type_of(value)}, expected text"
        batch.texts.append(value)
        batch.chars += len(value)
    else:
        if not isinstance(value, list) or ((b"true" in line or b"false" in line) and _type_of(value) != "ids"):
            return f"{column!r} holds {_type_of(value)}, expected a list of whole numbers"
        try:
            batch.ids.fromlist(value)
        except (TypeError, OverflowError):
            return f"{column!r} holds {_type_of(value)}, expected a list of whole numbers of at most 63 bits"
        batch.lengths.append(len(value))
    batch.clusters.append(number_of_cluster)
    batch.numbers.append(number)
    return ""


class _Lines:
    """Place of a line. Lines before the piece are counted only when a place is asked for."""

    def __init__(self, path: str, start: int) -> None:
        self.path, self.start = path, start

    def __call__(self, number: int) -> str:
        return f"{self.path}, line {self._before() + number}"

    def _before(self) -> int:
        """Lines that begin before the piece."""
        if not self.start:
            return 0
        breaks, left = 0, self.start - 1
        with open_lines(Path(self.path)) as lines:
            while left and (block := lines.read(min(left, _BUFFER))):
                breaks += block.count(b"\n")
                left -= len(block)
        return breaks + 1


def _rows(batch: _Batch, kind: Kind, path: str, start: int) -> TokenRows | TextRows:
    clusters_R, numbers, lines = np.array(batch.clusters, np.int64), batch.numbers, _Lines(path, start)
    if kind == "text":
        return TextRows(batch.texts, clusters_R, lambda row: lines(numbers[row]))
    ids_T = np.frombuffer(batch.ids, np.int64) if batch.ids else np.empty(0, np.int64)
    return TokenRows(ids_T, np.array(batch.lengths, np.int64), clusters_R, lambda row: lines(numbers[row]))

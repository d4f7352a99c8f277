"""Rows of parquet files: Arrow's list values without a copy, text as Python strings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from egmla_megatron.preprocess.columns import Columns, Kind, UnreadableError, choose_column
from egmla_megatron.preprocess.rows import NO_CLUSTER, Ledger, Place, TextRows, TokenRows

__all__ = ["column_type", "inspect", "read_groups", "rows_of"]

_BATCH_BYTES = 4 << 20  # of decoded values at a time: memory that is used again instead of asked for anew
_ARROW_ERRORS = (pa.ArrowException, OSError)


def column_type(dtype: Any) -> str:
    """`ids`, `text`, or the type's own name when it is neither."""
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype):
        return "text"
    listed = pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype)
    return "ids" if listed and pa.types.is_integer(dtype.value_type) else str(dtype)


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except _ARROW_ERRORS as error:
        raise UnreadableError(f"{path}: not a complete parquet file ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def inspect(path: Path, columns: Columns) -> tuple[Kind, str, str, tuple[int, ...]]:
    """(kind, column, cluster column, stored bytes of each row group)."""
    with _open(path) as file:
        schema = file.schema_arrow
        types = {name: column_type(schema.field(name).type) for name in schema.names}
        kind, column, cluster = choose_column(str(path), types, columns)
        groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
        sizes = tuple(sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups)
    return kind, column, cluster, sizes


def read_groups(
    path: str, kind: Kind, column: str, cluster: str, first: int, last: int, ledger: Ledger
) -> Iterator[TokenRows | TextRows]:
    """Batches of the row groups first to last - 1."""
    with _open(Path(path)) as file:
        for number in range(first, last):
            group, row = file.metadata.row_group(number), 0
            size = sum(group.column(i).total_uncompressed_size for i in range(group.num_columns))
            values = max(size // 8, *(group.column(i).num_values for i in range(group.num_columns)))
            rows = max(1, min(65_536, group.num_rows * _BATCH_BYTES // (8 * max(1, values))))
            batches = file.iter_batches(
                batch_size=rows, row_groups=[number], columns=[column, *filter(None, [cluster])], use_threads=False
            )
            while True:
                try:
                    batch = next(batches, None)
                except _ARROW_ERRORS as error:
                    where = f"{path}, row group {number} behind row {row}"
                    ledger.fault(where, f"cannot be decoded ({_first_line(error)})")
                    break
                if batch is None:
                    break
                place = _placer(f"{path}, row group {number}", row)
                row += batch.num_rows
                clusters = batch.column(cluster) if cluster else None
                yield from rows_of(batch.column(column), clusters, kind, ledger, place)


def _placer(prefix: str, first: int) -> Place:
    return lambda row: f"{prefix}, row {first + row}"


def rows_of(array: Any, clusters: Any, kind: Kind, ledger: Ledger, place: Place) -> Iterator[TokenRows | TextRows]:
    """One Arrow column as rows: nulls are counted and left out."""
    clusters_R = _clusters(clusters, len(array))
    ledger.counts["rows"] += len(array)
    kept = np.arange(len(array))
    if array.null_count:
        ledger.counts["null"] += array.null_count
        kept = np.flatnonzero(_valid(array))
        array, clusters_R = array.filter(array.is_valid()), clusters_R[kept]

    def original(row: int) -> str:
        return place(int(kept[row]))

    if kind == "tokens":
        yield _token_rows(array, clusters_R, ledger, original)
    else:
        yield _text_rows(array, clusters_R, ledger, original)


def _clusters(array: Any, count: int) -> np.ndarray:
    """Cluster ids as int64, NO_CLUSTER for nulls."""
    if array is None:
        return np.full(count, NO_CLUSTER, np.int64)
    return np.where(_valid(array), _numbers(array).astype(np.int64), NO_CLUSTER)


# Arrow's own to_numpy imports pandas, which costs every worker a second or more and 100 MB; pyarrow.compute 0.1 s.


def _list_lengths(array: Any) -> np.ndarray:
    """int64 length of each list of an Arrow array without nulls."""
    if pa.types.is_fixed_size_list(array.type):
        return np.full(len(array), array.type.list_size, np.int64)
    return np.diff(_numbers(array.offsets).astype(np.int64))


def _numbers(array: Any) -> np.ndarray:
    """An Arrow array of integers as it lies in memory, without a copy; anything where it is null."""
    values = np.frombuffer(array.buffers()[1] or b"", str(array.type))
    return values[array.offset : array.offset + len(array)]


def _valid(array: Any) -> np.ndarray:
    """True where an Arrow array is not null."""
    bits = array.buffers()[0]
    if bits is None:
        return np.ones(len(array), bool)
    unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return unpacked[array.offset : array.offset + len(array)].view(bool)


def _token_rows(array: Any, clusters_R: np.ndarray, ledger: Ledger, place: Place) -> TokenRows:
    values = array.flatten()
    lengths_R = _list_lengths(array)
    if values.null_count:
        ends = np.cumsum(lengths_R)
        bad_R = np.unique(np.searchsorted(ends, np.flatnonzero(~_valid(values)), side="right"))
        for row in bad_R.tolist():
            ledger.fault(place(row), "got a null among its ids, expected whole numbers")
        keep_R = np.ones(len(lengths_R), bool)
        keep_R[bad_R] = False
        kept = np.flatnonzero(keep_R)
        good_T = _numbers(values)[np.repeat(keep_R, lengths_R)]
        return TokenRows(good_T, lengths_R[kept], clusters_R[kept], lambda row: place(int(kept[row])))
    return TokenRows(_numbers(values), lengths_R, clusters_R, place)


def _text_rows(array: Any, clusters_R: np.ndarray, ledger: Ledger, place: Place) -> TextRows:
    try:
        return TextRows(array.to_pylist(), clusters_R, place)
    except UnicodeDecodeError:
        texts, kept = [], []
        for row, item in enumerate(array):
            try:
                texts.append(item.as_py())
                kept.append(row)
            except UnicodeDecodeError as error:
                ledger.fault(place(row), f"text is no UTF-8 ({error.reason} at byte {error.start})")
        return TextRows(texts, clusters_R[kept], lambda row: place(kept[row]))

"""Rows of data sets that the `datasets` library loads, streaming: from the hub or from a folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from egmla_megatron.errors import UserError
from egmla_megatron.preprocess.columns import Columns, Kind, UnreadableError, choose_column
from egmla_megatron.preprocess.read_parquet import column_type, rows_of
from egmla_megatron.preprocess.rows import Ledger, Place, TextRows, TokenRows

__all__ = ["PREFIX", "inspect", "read_shard"]

PREFIX = "hf:"
_BATCH_ROWS = 1000


def _load(name: str) -> Any:
    """`hf:NAME[@REVISION][:CONFIG[:SPLIT]]` -> a streaming data set; the split is train unless named."""
    import datasets

    datasets.disable_progress_bars()
    repository, _, rest = name.removeprefix(PREFIX).partition(":")
    repository, _, revision = repository.partition("@")
    config, _, split = rest.partition(":")
    return datasets.load_dataset(
        repository, config or None, split=split or "train", revision=revision or None, streaming=True
    )


def inspect(name: str, columns: Columns) -> tuple[Kind, str, str, int]:
    """(kind, column, cluster column, shards), from the first rows."""
    if not name.removeprefix(PREFIX).partition(":")[0].partition("@")[0]:
        raise UserError(
            f"--input: got {name!r} without a name, allowed {PREFIX}NAME[@REVISION][:CONFIG[:SPLIT]]; add it"
        )
    try:
        data = _load(name)
        first = next(iter(data.with_format("arrow").iter(batch_size=1)), None)
    except Exception as error:  # network, missing names and broken files raise dozens of types in there
        text = " ".join(str(error).split())[:300]
        raise UnreadableError(
            f"{name}: the datasets library cannot load it ({type(error).__name__}: {text}); check name and connection"
        ) from error
    if first is None:
        raise UserError(f"{name}: got no rows, expected data; choose another split: {PREFIX}NAME:CONFIG:SPLIT")
    types = {field.name: column_type(field.type) for field in first.schema}
    kind, column, cluster = choose_column(name, types, columns)
    return kind, column, cluster, data.num_shards


def read_shard(
    name: str, kind: Kind, column: str, cluster: str, shard: int, shards: int, ledger: Ledger
) -> Iterator[TokenRows | TextRows]:
    """Batches of one of the data set's shards (files)."""
    wanted = [column, *filter(None, [cluster])]
    row = 0
    batches = _load(name).shard(num_shards=shards, index=shard).select_columns(wanted)
    stream = iter(batches.with_format("arrow").iter(batch_size=_BATCH_ROWS))
    where = f"{name}, shard {shard}"
    while True:
        try:
            table = next(stream, None)
        except Exception as error:  # as above: reported by name, never dropped
            text = " ".join(str(error).split())[:300]
            ledger.fault(f"{where} behind row {row}", f"cannot be read ({type(error).__name__}: {text})")
            return
        if table is None:
            return
        table = table.combine_chunks()
        for batch in table.to_batches():
            place = _placer(where, row)
            row += batch.num_rows
            clusters = batch.column(cluster) if cluster else None
            yield from rows_of(batch.column(column), clusters, kind, ledger, place)


def _placer(where: str, first: int) -> Place:
    return lambda row: f"{where}, row {first + row}"

"""Copies documents from the parts to one .bin in a given order, hashing what it writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from egmla_megatron.preprocess.part import part_file
from egmla_megatron.preprocess.select import Catalogue

__all__ = ["CHUNK_BYTES", "assemble"]

CHUNK_BYTES = 64 << 20  # of output gathered at a time; within it the parts are read in their own order


def assemble(
    path: Path,
    folder: Path,
    catalogue: Catalogue,
    order_D: np.ndarray,
    dtype: np.dtype,
    progress: Callable[[int], object],
    chunk_bytes: int = CHUNK_BYTES,
) -> str:
    """Writes the documents `order_D` to `path`; returns the sha256 of what was written.

    progress: called with the bytes of every chunk. Memory: three chunks, and a document longer than one.
    """
    bins = _Bins(folder)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as out, ThreadPoolExecutor(1) as thread:
        pending: Future[None] | None = None
        for first, last in _chunks(catalogue.lengths_D[order_D] * dtype.itemsize, chunk_bytes):
            chunk = _gather(bins, catalogue, order_D[first:last], dtype.itemsize)
            if pending is not None:
                pending.result()
            pending = thread.submit(_put, out, digest, chunk)
            progress(len(chunk))
        if pending is not None:
            pending.result()
    return digest.hexdigest()


def _put(out: BinaryIO, digest: hashlib._Hash, chunk: bytearray) -> None:
    view = memoryview(chunk)
    while view:
        view = view[out.write(view) :]
    digest.update(chunk)


class _Bins:
    """The parts' .bin files, mapped when first read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.maps: dict[int, memoryview] = {}

    def __getitem__(self, part: int) -> memoryview:
        if part not in self.maps:
            self.maps[part] = memoryview(np.memmap(part_file(self.folder, part, "bin"), mode="r", dtype=np.uint8))
        return self.maps[part]


def _chunks(sizes_D: np.ndarray, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of documents of about chunk_bytes together, at least one document each."""
    ends_D = np.cumsum(sizes_D)
    first = 0
    while first < len(ends_D):
        begin = int(ends_D[first] - sizes_D[first])
        last = max(first + 1, int(np.searchsorted(ends_D, begin + chunk_bytes, side="right")))
        yield first, last
        first = last


def _gather(bins: _Bins, catalogue: Catalogue, order_D: np.ndarray, itemsize: int) -> bytearray:
    """Bytes of the documents in order; documents that lie side by side in both places are copied as one."""
    sizes = catalogue.lengths_D[order_D] * itemsize
    targets = np.cumsum(sizes) - sizes
    chunk = bytearray(int(sizes.sum()))
    by_source = np.argsort(order_D)
    order_D, sizes, targets = order_D[by_source], sizes[by_source], targets[by_source]
    parts, sources = catalogue.parts_D[order_D], catalogue.offsets_D[order_D] * itemsize
    joined = (
        (parts[1:] == parts[:-1])
        & (sources[1:] == sources[:-1] + sizes[:-1])
        & (targets[1:] == targets[:-1] + sizes[:-1])
    )
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    lasts = np.concatenate((starts[1:], [len(order_D)])) - 1
    spans = sources[lasts] + sizes[lasts] - sources[starts]
    view = memoryview(chunk)
    columns = (parts[starts], sources[starts], targets[starts], spans)
    for part, source, target, size in zip(*(column.tolist() for column in columns), strict=True):
        view[target : target + size] = bins[part][source : source + size]
    return chunk

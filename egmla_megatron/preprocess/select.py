"""Which documents go where, and in which order: from hashes and a seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from egmla_megatron.preprocess.options import Options
from egmla_megatron.preprocess.part import part_file

__all__ = ["Catalogue", "Selection", "is_validation", "load_catalogue", "select"]

_HALF = 2**64


@dataclass(frozen=True)
class Catalogue:
    """All documents of all parts, in input order. D documents, P parts."""

    lengths_D: np.ndarray  # int64 tokens
    hashes_D2: np.ndarray  # uint64
    clusters_D: np.ndarray  # int64
    parts_D: np.ndarray  # int32, the part each is in
    offsets_D: np.ndarray  # int64 tokens before it in its part
    distinct_ids: int


@dataclass(frozen=True)
class Selection:
    """Document numbers in output order."""

    train_D: np.ndarray  # int64
    valid_D: np.ndarray  # int64
    duplicates: int  # documents left out


def load_catalogue(folder: Path, parts: int) -> Catalogue:
    """Reads the arrays of all parts."""
    loaded = [dict(np.load(part_file(folder, number, "npz"))) for number in range(parts)]
    counts = [len(arrays["lengths"]) for arrays in loaded]
    seen = np.bitwise_or.reduce([arrays["seen"] for arrays in loaded])
    return Catalogue(
        lengths_D=np.concatenate([arrays["lengths"] for arrays in loaded]),
        hashes_D2=np.concatenate([arrays["hashes"] for arrays in loaded]),
        clusters_D=np.concatenate([arrays["clusters"] for arrays in loaded]),
        parts_D=np.repeat(np.arange(parts, dtype=np.int32), counts),
        offsets_D=np.concatenate([np.cumsum(arrays["lengths"]) - arrays["lengths"] for arrays in loaded]),
        distinct_ids=int(np.bitwise_count(seen).sum()),
    )


def is_validation(hashes_D2: np.ndarray, fraction: float) -> np.ndarray:
    """True where the first half of the hash is below fraction * 2^64: the same documents in every data set."""
    limit = min(int(fraction * _HALF), _HALF - 1)
    chosen: np.ndarray = hashes_D2[:, 0] < np.uint64(limit)
    return chosen


def _first_of_each(hashes_D2: np.ndarray) -> np.ndarray:
    """Numbers, rising, of the documents that no earlier one equals."""
    order = np.lexsort((hashes_D2[:, 1], hashes_D2[:, 0]))  # stable: equal documents stay in input order
    ordered = hashes_D2[order]
    new = np.ones(len(order), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.sort(order[new])


def select(catalogue: Catalogue, options: Options) -> Selection:
    """Duplicates out (by option), validation apart, both shuffled (by option)."""
    total = len(catalogue.lengths_D)
    kept_D = _first_of_each(catalogue.hashes_D2) if options.dedupe else np.arange(total)
    valid = is_validation(catalogue.hashes_D2[kept_D], options.validation_fraction)
    splits = [kept_D[~valid], kept_D[valid]]
    if options.shuffle:
        splits = [np.random.default_rng([options.seed, i]).permutation(split) for i, split in enumerate(splits)]
    return Selection(splits[0], splits[1], total - len(kept_D))

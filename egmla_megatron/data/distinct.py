"""How many distinct ids there are among so many tokens of the training data, as a micro-batch meets them.

A micro-batch is made of sequences from all over the data, which have more ids in common the more alike its texts are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from egmla_megatron.data.blend import parse_blend
from egmla_megatron.data.verify import DTYPE_CODES, MAGIC

__all__ = ["FIRST_POWER", "LAST_POWER", "distinct_shares"]

FIRST_POWER, LAST_POWER = 10, 16  # of two: numbers of tokens that shares are measured for
_DRAWS = 8  # of 2**LAST_POWER tokens: about a thousand sequences are read


def distinct_shares(entries: Sequence[str], length: int) -> tuple[float, ...]:
    """Shares of distinct ids among 2**FIRST_POWER, twice that ... tokens of `data.train`, in sequences of `length`.

    Empty where a file is not there or is no data set, or where the data are shorter than that.
    """
    prefixes, weights = parse_blend(entries, "data.train")
    sets = [_tokens(prefix) for prefix in prefixes]
    known = [each_T for each_T in sets if each_T is not None and len(each_T)]
    total = sum(map(len, known))
    if not prefixes or len(known) < len(prefixes) or total < 2**FIRST_POWER:
        return ()
    chances = np.array(weights or list(map(len, known)), float)
    last = min(LAST_POWER, total.bit_length() - 1)
    draw = np.random.default_rng(0)
    draws = [_draw(known, chances / chances.sum(), length, 2**last, draw) for _ in range(_DRAWS)]
    return tuple(_mean_share(draws, 2**power) for power in range(FIRST_POWER, last + 1))


def _tokens(prefix: str) -> np.ndarray | None:
    """All ids of a data set, not read yet; None where it is not there."""
    try:
        with Path(f"{prefix}.idx").open("rb") as file:
            magic, _, code = struct.unpack("<9sQB", file.read(18))
        if magic != MAGIC or code not in DTYPE_CODES:
            return None
        return np.memmap(f"{prefix}.bin", mode="r", dtype=np.dtype(DTYPE_CODES[code]).newbyteorder("<"))
    except (OSError, ValueError, struct.error):  # cut short or empty: `verify_prefix` says so to whoever trains on it
        return None


def _draw(
    sets: Sequence[np.ndarray], chances: np.ndarray, length: int, count: int, draw: np.random.Generator
) -> np.ndarray:
    """`count` ids in sequences from random places."""
    found: list[np.ndarray] = []
    for which in draw.choice(len(sets), size=-(-count // length), p=chances):
        ids_T = sets[which]
        start = int(draw.integers(0, max(1, len(ids_T) // length))) * length
        found.append(np.resize(ids_T[start : start + length], length))  # repeated where the data are shorter
    return np.concatenate(found)[:count]


def _mean_share(draws: Sequence[np.ndarray], size: int) -> float:
    """Over all parts of so many ids."""
    parts = [ids_T[start : start + size] for ids_T in draws for start in range(0, len(ids_T) - size + 1, size)]
    return round(float(np.mean([len(np.unique(part)) / size for part in parts])), 4)

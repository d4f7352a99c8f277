"""The type of ids on disk, and .idx files from document lengths: all arithmetic is in 64 bits."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from egmla_megatron.data.verify import DTYPE_CODES, MAGIC
from egmla_megatron.errors import UserError

__all__ = ["id_dtype", "write_index"]

_UINT16_SIZE = 65_500  # megatron-core's own threshold between uint16 and int32
_LONGEST = 2**31 - 1  # tokens: lengths are stored in 32 bits


def id_dtype(vocab_size: int) -> np.dtype:
    """Type of the ids on disk: what megatron-core takes for a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_SIZE else np.int32)


def write_index(path: Path, lengths_D: np.ndarray, dtype: np.dtype) -> None:
    """One sequence per document, byte-identical to megatron-core's IndexedDatasetBuilder.

    lengths_D: tokens of each document. dtype: of the ids in the .bin. UserError when a document is too long for the
    format.
    """
    lengths_D = np.asarray(lengths_D, np.int64)
    if len(lengths_D) and int(lengths_D.max()) > _LONGEST:
        raise UserError(
            f"document {int(lengths_D.argmax())}: got {int(lengths_D.max())} tokens, allowed {_LONGEST}; cut it"
        )
    code = {name: code for code, name in DTYPE_CODES.items()}[np.dtype(dtype).name]
    with path.open("wb", buffering=1 << 20) as out:
        out.write(struct.pack("<9sQBQQ", MAGIC, 1, code, len(lengths_D), len(lengths_D) + 1))
        out.write(lengths_D.astype("<i4"))
        offsets_D = (np.cumsum(lengths_D, dtype=np.int64) - lengths_D) * np.dtype(dtype).itemsize
        out.write(offsets_D.astype("<i8"))
        out.write(np.arange(len(lengths_D) + 1, dtype="<i8"))

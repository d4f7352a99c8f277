"""A .txt file is one document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from egmla_megatron.preprocess.rows import NO_CLUSTER, Ledger, TextRows

__all__ = ["read_file"]


def read_file(path: str, ledger: Ledger) -> Iterator[TextRows]:
    """The whole file as one row of text, which must be UTF-8."""
    ledger.counts["rows"] += 1
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # without a byte order mark
    except (UnicodeDecodeError, OSError) as error:
        ledger.fault(path, f"cannot be read as UTF-8 text ({error})")
        return
    yield TextRows([text], np.array([NO_CLUSTER]), lambda row: path)

"""The last error in a job's log: what a person would look for first."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["last_words", "size_of"]

_TAIL_BYTES = 1 << 18
_MOST = 300  # characters of a line
_ERROR = re.compile(rb"^(?:error: .*|[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*|.*CUDA error.*|srun: error: .*)$")


def size_of(log: str) -> int:
    """Bytes of a log so far; 0 where it cannot be seen."""
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def last_words(log: str, since: int = 0) -> str:
    """The lines of `log` after byte `since` that name the error: ours and an exception's, or else srun's.

    Empty where there is none, or where the log cannot be read (in a container it may not be mounted).
    """
    try:
        with Path(log).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(min(since, end), end - _TAIL_BYTES))
            lines = [line.strip() for line in file.read().split(b"\n")]
    except OSError:
        return ""
    found = [line.decode(errors="replace") for line in lines if _ERROR.match(line)]
    errors = [line.removeprefix("error: ") for line in found if line.startswith("error: ")]
    exceptions = [line for line in found if not line.startswith(("error: ", "srun: "))]
    last = [*errors[:1], *exceptions[-1:]] or found[-1:]  # of our own the first: the others report its consequences
    return "; ".join(line[:_MOST] for line in last)

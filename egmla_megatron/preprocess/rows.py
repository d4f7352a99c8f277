"""What readers hand to the encoder, and what happens with rows that cannot be used."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from egmla_megatron.errors import UserError

__all__ = ["MAX_EXAMPLES", "NO_CLUSTER", "Ledger", "Place", "TextRows", "TokenRows"]

NO_CLUSTER = -(2**63)  # the id that no reader lets in; -1 is what some clusterings call noise
MAX_EXAMPLES = 10  # faults quoted per part

Place = Callable[[int], str]  # number of a row within its batch -> "file, line 7"


@dataclass(frozen=True)
class TokenRows:
    """Rows of ids. R rows, T ids in all."""

    values_T: np.ndarray  # any integer type, not yet checked
    lengths_R: np.ndarray  # int64
    clusters_R: np.ndarray  # int64, NO_CLUSTER where the input has none
    place: Place


@dataclass(frozen=True)
class TextRows:
    """Rows of text."""

    texts: list[str]
    clusters_R: np.ndarray  # int64
    place: Place


@dataclass
class Ledger:
    """Counts of one input file (or a part of it), and the rule for faults."""

    on_error: str  # stop or skip
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # reader and encoder are two threads

    def fault(self, place: str, problem: str) -> None:
        """Raises UserError, or counts the fault when faults are to be skipped."""
        if self.on_error == "stop":
            raise UserError(f"{place}: {problem}; mend the input, or leave such rows out with --on-error skip")
        with self._lock:
            self.counts["faults"] += 1
            if len(self.examples) < MAX_EXAMPLES:
                self.examples.append(f"{place}: {problem}")

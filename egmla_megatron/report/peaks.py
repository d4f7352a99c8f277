"""The most memory that a run held: one definition for the report, the console and the quickstart's result.

Lines of steps say the most so far of the worst rank, the line of an end the most of every rank, with the evaluation and
the checkpoint behind the last step. Work that a restart threw away was held in memory as well, so its lines count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Peak", "largest", "peak_of"]

PEAK, RESERVED = "peak_memory", "reserved_memory"  # as in train/events.py, without units


@dataclass(frozen=True)
class Peak:
    """Of the worst rank."""

    mib: float
    rank: int | None


def peak_of(record: dict[str, Any], name: str = PEAK) -> Peak | None:
    """What the line of a step or of an end says; None: nothing."""
    by_rank = record.get(f"{name}_mib_by_rank")
    if isinstance(by_rank, Sequence) and by_rank and all(map(_is_number, by_rank)):
        rank = max(range(len(by_rank)), key=by_rank.__getitem__)
        return Peak(float(by_rank[rank]), rank)
    mib = record.get(f"{name}_mib")
    if mib is None or not _is_number(mib):
        return None
    return Peak(float(mib), record.get(f"{name}_rank"))


def largest(peaks: Iterable[Peak | None]) -> Peak | None:
    """The first of the largest; None where nothing is known."""
    return max((peak for peak in peaks if peak is not None), key=lambda peak: peak.mib, default=None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

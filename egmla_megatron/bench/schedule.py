"""How many steps a variant trains, and for what."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Training steps of one variant, in this order."""

    warmup: int
    timed: int
    probed: int  # with the exchange's probe, which may slow a step down

    @property
    def counted_step(self) -> int:
        """Number of the step whose collectives are counted; it comes after the timed ones."""
        return self.warmup + self.timed

    @property
    def total(self) -> int:
        """All steps."""
        return self.warmup + self.timed + 1 + self.probed

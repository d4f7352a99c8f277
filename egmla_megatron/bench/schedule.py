"""How many steps a variant trains, and for what."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MOST_ROUNDS", "MOST_STEPS", "Schedule"]

MOST_STEPS, MOST_ROUNDS = 100_000, 1000  # that options take: more is a slip of the finger


@dataclass(frozen=True)
class Schedule:
    """Training steps of one variant, in this order."""

    warmup: int
    timed: int
    probed: int  # with the exchange's probe, which may slow a step down

    @property
    def measured(self) -> int:
        """The timed steps and one before and behind them: where steps are launched ahead, the first of a row seems to
        end late, since launching a long graph waits for the one before, and the last one early."""
        return self.timed + 2

    @property
    def counted_step(self) -> int:
        """Number of the step whose collectives are counted; it comes after the timed ones."""
        return self.warmup + self.measured

    @property
    def total(self) -> int:
        """All steps."""
        return self.warmup + self.measured + 1 + self.probed

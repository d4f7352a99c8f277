"""The paper's table of vanilla against dimension-wise parallelism: EG-MLA-Base, 8192 tokens a node and step (as its
throughput times its step time says). It does not name the cards and the link of this table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PAPER", "PaperRow", "paper_pairs"]


@dataclass(frozen=True)
class PaperRow:
    """One row of the table."""

    method: str
    nodes: int
    peak_mb: int
    tokens_per_second: int
    step_ms: float
    exchange_ms: float  # 0: vanilla


PAPER = (
    PaperRow("vanilla", 2, 13950, 42528, 385.25, 0.0),
    PaperRow("dimension-wise", 2, 12233, 86743, 188.88, 16.25),
    PaperRow("vanilla", 4, 13950, 80114, 409.02, 0.0),
    PaperRow("dimension-wise", 4, 11759, 175031, 187.21, 24.38),
)


def paper_pairs(nodes: int) -> tuple[tuple[PaperRow, PaperRow], ...]:
    """(vanilla, dimension-wise) on so many nodes, or every pair where the paper has none for it."""
    pairs = tuple((PAPER[i], PAPER[i + 1]) for i in range(0, len(PAPER), 2))
    return tuple(pair for pair in pairs if pair[0].nodes == nodes) or pairs

"""What all ranks measured becomes one row of the result."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from egmla_megatron.bench.predict import Traffic
from egmla_megatron.bench.variants import Variant

__all__ = ["Facts", "make_row", "percentile", "slowest"]


@dataclass(frozen=True)
class Facts:
    """What is known of a variant without measuring it."""

    variant: Variant
    ranks: int  # data-parallel ranks
    tokens_per_step: int  # of all ranks
    link_gb_per_s: float
    predicted: Traffic
    exchanged_rows: int  # rows that a rank receives in a step; 0: replicated tables
    unique_fraction: float  # distinct ids of a micro-batch / its tokens


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values; share from 0 to 1."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def slowest(rounds: Sequence[Sequence[Any]]) -> list[list[float]]:
    """Per round: the time of every step, by its slowest rank."""
    return [[max(times) for times in zip(*(rank.step_ms for rank in ranks), strict=True)] for ranks in rounds]


def _worst(rounds: Sequence[Sequence[Any]], value: Callable[[Any], float | None]) -> float | None:
    """Largest value of any rank and round; None when one does not know it."""
    values = [value(rank) for ranks in rounds for rank in ranks]
    known = [each for each in values if each is not None]
    return max(known) if len(known) == len(values) else None


def _exchange(rounds: Sequence[Sequence[Any]], name: str) -> float:
    """Median over steps of the largest number of any rank; 0 where nothing is exchanged."""
    steps = [step for ranks in rounds for step in zip(*(rank.exchange for rank in ranks), strict=True)]
    return statistics.median(max(getattr(times, name) for times in step) for step in steps) if steps else 0.0


def make_row(facts: Facts, rounds: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """One row of the result.

    Args:
        rounds: per round, the `Measurement` of every rank.
    """
    per_round = slowest(rounds)
    times = [ms for some in per_round for ms in some]
    median = statistics.median(times)
    first, last = rounds[0][0], rounds[-1][0]
    return {
        "variant": facts.variant.name,
        "gate_world": facts.ranks,
        "link_gb_per_s": facts.link_gb_per_s,
        "step_ms_median": median,
        "step_ms_p10": percentile(times, 0.1),
        "step_ms_p90": percentile(times, 0.9),
        "n": len(times),
        "tokens_per_second": facts.tokens_per_step / median * 1e3,
        "peak_mib": _worst(rounds, lambda rank: rank.peak_mib),
        "exchange_ms": _exchange(rounds, "exchange_ms"),
        "exposed_ms": _exchange(rounds, "exposed_ms"),
        "bytes_sent_per_rank": round(max(rank.sent_bytes for ranks in rounds for rank in ranks)),
        "bytes_predicted_per_rank": round(facts.predicted.total),
        "gate_group": facts.variant.gate_group(facts.ranks),
        "bytes_predicted_dense": round(facts.predicted.dense),
        "bytes_predicted_tables": round(facts.predicted.tables),
        "bytes_predicted_exchange": round(facts.predicted.exchange),
        "wire_bytes_per_rank": _wire(rounds),
        "peak_rss_mib": _worst(rounds, lambda rank: rank.peak_rss_mib),
        "step_ms_median_of_rounds": [statistics.median(some) for some in per_round],
        "exchanged_rows": facts.exchanged_rows,
        "unique_fraction": facts.unique_fraction,
        "collectives": first.collectives,
        "bytes_by_collective": first.sent_by_collective,
        "loss_first": first.losses[0],
        "loss_last": last.losses[-1],
    }


def _wire(rounds: Sequence[Sequence[Any]]) -> int | None:
    """Mean over ranks and rounds: the share of a rank is only known per machine."""
    values = [rank.wire_bytes for ranks in rounds for rank in ranks]
    return None if None in values else round(statistics.fmean(values))

"""The figures of a run that reports and comparisons show, computed once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from egmla_megatron.report.peaks import largest
from egmla_megatron.report.read import Record, RunMetrics

__all__ = ["LastLoss", "Spread", "Summary", "finite", "spread", "summarize"]

_LAST = 10  # lines averaged for the final training loss: one batch is noisy


@dataclass(frozen=True)
class LastLoss:
    """The loss of the newest record, and the newest that was finite; in nats per token."""

    value: float | None  # None: not finite
    finite: float | None  # None: none ever was
    finite_step: int | None

    @classmethod
    def of(cls, records: list[Record], key: str) -> LastLoss:
        """Of records in their order, at least one."""
        newest = next((record for record in reversed(records) if _value(record, key) is not None), None)
        step = newest["step"] if newest else None
        return cls(_value(records[-1], key), _value(newest, key) if newest else None, step)


@dataclass(frozen=True)
class Spread:
    """A sample's median, size and quartiles."""

    median: float
    n: int
    low: float  # first quartile
    high: float  # third quartile


@dataclass(frozen=True)
class Summary:
    """Losses in nats per token, times in seconds, memory in MiB."""

    steps: int
    tokens: int
    first_step: int  # that has a line
    first_loss: float | None  # of that step; of all losses None: not finite, or not known
    last_loss: LastLoss
    mean_last_loss: float | None  # of the finite ones among the last 10 lines
    last_val_loss: LastLoss | None
    val_loss: float | None  # of the last evaluation
    val_ppl: float | None
    best_val_loss: float | None
    best_val_step: int | None
    skipped: int
    training_time_s: float
    peak_memory_mib: float | None  # of all starts (peaks.py)
    peak_memory_rank: int | None
    reserved_memory_mib: float | None  # by torch's allocator on a GPU, of the worst rank
    unique_id_fraction: float | None  # of the tokens of a micro-batch, mean over the steps
    tokens_per_second: Spread | None
    tokens_per_second_per_rank: Spread | None
    step_time_s: Spread | None
    tflops_per_second_per_rank: Spread | None
    mfu: Spread | None
    checkpoint_s: Spread | None


def finite(records: Iterable[Record], key: str) -> list[float]:
    """Returns the finite values of `key`, records without one left out."""
    values = (_value(record, key) for record in records)
    return [value for value in values if value is not None]


def _value(record: Record, key: str) -> float | None:
    """A finite value, or None."""
    value = record.get(key)
    return float(value) if value is not None and math.isfinite(value) else None


def spread(values: list[float]) -> Spread | None:
    """Returns the sample's spread, None for an empty one."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], 1, values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, len(values), low, high)


def summarize(metrics: RunMetrics) -> Summary:
    """Computes the summary of a run with at least one step."""
    steady = metrics.steady_steps()
    losses = finite(metrics.steps[-_LAST:], "loss")
    scored = [record for record in metrics.evals if finite([record], "val_loss")]
    best = min(scored, key=lambda record: record["val_loss"], default=None)
    peak, reserved = largest(metrics.peaks), largest(metrics.reserved_peaks)
    shares = finite(metrics.steps, "unique_id_fraction")
    last = metrics.steps[-1]
    return Summary(
        steps=last["step"],
        tokens=int(last.get("tokens", 0)),
        first_step=metrics.steps[0]["step"],
        first_loss=_value(metrics.steps[0], "loss"),
        last_loss=LastLoss.of(metrics.steps, "loss"),
        mean_last_loss=statistics.fmean(losses) if losses else None,
        last_val_loss=LastLoss.of(metrics.evals, "val_loss") if metrics.evals else None,
        val_loss=_value(metrics.evals[-1], "val_loss") if metrics.evals else None,
        val_ppl=_value(metrics.evals[-1], "val_ppl") if metrics.evals else None,
        best_val_loss=best["val_loss"] if best else None,
        best_val_step=best["step"] if best else None,
        skipped=sum(bool(record.get("skipped")) for record in metrics.steps),
        training_time_s=sum(filter(math.isfinite, metrics.seconds_of_lines())),
        peak_memory_mib=peak.mib if peak else None,
        peak_memory_rank=peak.rank if peak else None,
        reserved_memory_mib=reserved.mib if reserved else None,
        unique_id_fraction=statistics.fmean(shares) if shares else None,
        tokens_per_second=spread(finite(steady, "tokens_per_second")),
        tokens_per_second_per_rank=spread(finite(steady, "tokens_per_second_per_rank")),
        step_time_s=spread(finite(steady, "step_time_s")),
        tflops_per_second_per_rank=spread(finite(steady, "tflops_per_second_per_rank")),
        mfu=spread(finite(steady, "mfu")),
        checkpoint_s=spread(finite(metrics.checkpoints, "seconds")),
    )

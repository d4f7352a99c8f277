"""Where the measurement of the gate exchange is connected: the one place that knows the model's probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from egmla_megatron.attention import exchange

__all__ = ["ExchangeTimes", "timed_exchange"]


@dataclass(frozen=True)
class ExchangeTimes:
    """Of one step on this rank, in ms; None: the model has no probe."""

    exchange_ms: float | None  # its collectives alone
    exposed_ms: float | None  # time for which the step waited for them


def timed_exchange(step: Callable[[], Any]) -> ExchangeTimes:
    """Runs `step`, a whole training step of a model with sharded tables."""
    watch = getattr(exchange, "watch_exchange", None)
    if watch is None:
        step()
        return ExchangeTimes(None, None)
    with watch() as probe:
        step()
    return ExchangeTimes(probe.exchange_ms(), probe.exposed_ms())

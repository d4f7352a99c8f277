"""Where the measurement of the gate exchange is connected: the one place that knows the model's probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from egmla_megatron.attention.exchange_probe import watch_exchange
from egmla_megatron.bench.link import synchronize

__all__ = ["ExchangeTimes", "timed_exchange"]


@dataclass(frozen=True)
class ExchangeTimes:
    """Of one step on this rank."""

    exchange_ms: float  # inside its collectives
    exposed_ms: float  # for which the layers waited for them


def timed_exchange(step: Callable[[], Any], device: torch.device) -> ExchangeTimes:
    """Runs `step`, a whole training step of a model with sharded tables."""
    with watch_exchange() as probe:
        step()
    synchronize(device)
    return ExchangeTimes(probe.exchange_ms(), probe.exposed_ms())

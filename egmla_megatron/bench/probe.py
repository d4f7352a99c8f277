"""Where the measurement of the gate exchange is connected: the one place that knows the model's probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from egmla_megatron.attention.exchange_probe import watch_exchange
from egmla_megatron.bench.link import synchronize
from egmla_megatron.parallel.world import World

__all__ = ["ExchangeTimes", "timed_exchange"]


@dataclass(frozen=True)
class ExchangeTimes:
    """Of one step, the same on all ranks: waiting for a rank that comes late is no cost of the exchange."""

    exchange_ms: float  # inside its collectives
    exposed_ms: float  # for which the layers waited for them


def timed_exchange(step: Callable[[], Any], world: World) -> ExchangeTimes:
    """Runs `step`, a whole training step of a model whose tables are sharded over all ranks. Called by all of them."""
    with watch_exchange() as probe:
        step()
    synchronize(world.device)
    return ExchangeTimes(probe.exchange_ms(world.control), probe.exposed_ms(world.control))

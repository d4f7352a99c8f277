"""Where the time of a step goes on this rank: device events, read when the step has ended anyway; on a CPU the host's
clock. Nothing here waits for the device.

| part | from ... to |
|---|---|
| data | the schedule asks for a micro-batch ... it is there; loading behind queued device work costs nothing |
| exchange | for which the layers waited for gate embeddings or their gradients (what overlaps is not counted) |
| gradient_sync | the last backward is done ... gradients are reduced and scaled: what did not overlap with backward |
| forward_backward | zeroing gradients ... the last backward, less the parts above; with waits for pipeline stages |
| optimizer | mean of the loss, gradient norm, clipping, update, gathering of updated parameters |

They add up to the step on the device. Waiting for a slower rank counts where it happens, in a collective. Inside a CUDA
graph no event has a time, so exchange and gradient_sync are not known there and lie in forward_backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron.core.utils import get_model_config

from egmla_megatron.attention.exchange_probe import ExchangeProbe, Span, watch_exchange
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch
from egmla_megatron.parallel.world import World

__all__ = ["Measured", "Split", "StepTimes", "step_times"]


@dataclass(frozen=True)
class Split:
    """One step of one rank, in seconds; None: cannot be measured."""

    data: float
    forward_backward: float
    exchange: float | None
    gradient_sync: float | None
    optimizer: float
    busy: float  # data, forward and backward, without any wait for other ranks but tensor- and context-parallel ones


class _Timer:
    """What megatron-core's schedules start and stop around their parts (`ModelParallelConfig.timers`)."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.begin, self.end = begin, end

    def start(self, barrier: bool = False) -> None:
        """`barrier` is ignored: measuring must not make ranks wait."""
        self.begin()

    def stop(self, barrier: bool = False) -> None:
        """As start."""
        self.end()


class Measured:
    """One step's marks on the device's or the host's time line.

    Args:
        cuda: events of the device, else the host's clock.
        captured: forward and backward are one CUDA graph.
        exchanges: the gating tables are sharded.
    """

    def __init__(self, *, cuda: bool, captured: bool, exchanges: bool) -> None:
        self.captured, self.exchanges = captured, exchanges
        self.data: list[Span] = []
        self.computing: list[Span] = []
        self.syncing: list[Span] = []
        self.passes = self.optimizer = Span(cuda)
        self.probe: ExchangeProbe | None = None

    def split(self) -> Split:
        """Once the device has finished the step."""
        data, computing = _seconds(self.data), _seconds(self.computing)
        sync = None if self.captured else _seconds(self.syncing)
        exchange: float | None = 0.0
        if self.exchanges:
            exchange = sum(self.probe.waited_ms()) / 1e3 if self.probe is not None else None
        apart = data + (exchange or 0.0) + (sync or 0.0)
        return Split(
            data=data,
            forward_backward=max(0.0, _seconds([self.passes]) - apart),
            exchange=exchange,
            gradient_sync=sync,
            optimizer=_seconds([self.optimizer]),
            # the schedule asks for data inside its forward passes
            busy=data if self.captured else max(0.0, computing - (exchange or 0.0)),
        )


class StepTimes:
    """Measures the steps that run inside `step`; `measured` is the last one's.

    Args:
        cuda: events of the device, else the host's clock.
        captured: forward and backward are one CUDA graph.
        exchanges: the gating tables are sharded.
    """

    def __init__(self, *, cuda: bool, captured: bool, exchanges: bool) -> None:
        self.cuda, self.captured, self.exchanges = cuda, captured, exchanges
        self._measuring = False
        self.measured = self._new()
        compute = _Timer(lambda: self._begin(self.measured.computing), lambda: self._end(self.measured.computing))
        self._timers = {"forward-compute": compute, "backward-compute": compute}
        self._ignored = _Timer(lambda: None, lambda: None)

    def attach(self, model: list[Any]) -> None:
        """Listen to the schedules and to the gradient synchronisation of the DDP-wrapped chunks, once."""
        if self.captured:
            return
        config = get_model_config(model[0])
        config.timers = lambda name, log_level=0: self._timers.get(name, self._ignored)
        finalize = config.finalize_model_grads_func

        def finalize_and_time(*args: Any, **kwargs: Any) -> None:
            self._begin(self.measured.syncing)
            finalize(*args, **kwargs)
            self._end(self.measured.syncing)

        config.finalize_model_grads_func = finalize_and_time

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same micro-batches."""
        while True:
            self._begin(self.measured.data)
            batch = next(batches)
            self._end(self.measured.data)
            yield batch

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step; `passes_done` must be called in it."""
        self.measured = self._new()
        self._measuring = True
        try:
            with watch_exchange() if self.exchanges and not self.captured else nullcontext() as self.measured.probe:
                yield
                self.measured.optimizer.stop()
        finally:
            self._measuring = False

    def passes_done(self) -> None:
        """All forward and backward passes are launched; what follows is the optimizer's."""
        self.measured.passes.stop()
        self.measured.optimizer = Span(self.cuda)

    def _new(self) -> Measured:
        return Measured(cuda=self.cuda, captured=self.captured, exchanges=self.exchanges)

    def _begin(self, spans: list[Span]) -> None:
        if self._measuring:
            spans.append(Span(self.cuda))

    def _end(self, spans: list[Span]) -> None:
        if self._measuring:
            spans[-1].stop()


def _seconds(spans: Iterable[Span]) -> float:
    return sum(span.ms() for span in spans) / 1e3


def step_times(cfg: RunConfig, world: World, model: list[Any]) -> StepTimes | None:
    """Attached to `model`, the DDP-wrapped chunks; None where `logging.step_times` is off."""
    if not cfg.logging.step_times:
        return None
    times = StepTimes(
        cuda=world.device.type == "cuda", captured=cfg.train.cuda_graph, exchanges=world.layout.gate_group > 1
    )
    times.attach(model)
    return times

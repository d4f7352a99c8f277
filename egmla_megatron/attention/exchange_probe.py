"""How long the exchange's collectives take, and how long a step really waits for them. Off unless measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["ExchangeProbe", "Span", "collective", "waiting", "watch_exchange"]

_active: ExchangeProbe | None = None  # one measurement at a time, in one process


class Span:
    """Time between two points: of the current CUDA stream, or of the host where there is none."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.begin: Any = self._now()
        self.end: Any = None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """The second point."""
        self.end = self._now()

    def ms(self) -> float:
        """Milliseconds; on a GPU only once the device has passed both points."""
        return self._between(self.begin)

    def ms_behind(self, other: Span) -> float:
        """From the other's second point to this one's; as `ms`."""
        return self._between(other.end)

    def wait(self) -> None:
        """Until the device has passed the second point."""
        if self.cuda:
            self.end.synchronize()

    def _between(self, begin: Any) -> float:
        return begin.elapsed_time(self.end) if self.cuda else (self.end - begin) * 1e3


class ExchangeProbe:
    """Collects while `watch_exchange` is entered; read after the device was synchronised, on every rank of a group.

    A rank that comes early waits for the others, which is no cost of the exchange: each number is the least over the
    ranks of `group`, that of the rank that came last.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []  # collectives, on the stream they run on
        self.waits: list[Span] = []  # on the stream of the layers: from wanting the rows to having them
        self.behind: list[tuple[Any, Any]] = []  # backward: (layers' stream has nothing left to do, collective done)

    def exchange_ms(self, group: ProcessGroup) -> float:
        """Milliseconds inside the collectives."""
        return _least([span.ms() for span in self.spans], group)

    def exposed_ms(self, group: ProcessGroup) -> float:
        """Milliseconds that the layers' stream had to wait for collectives: forward before the first gate, backward
        behind the last layer. On a CPU every collective is waited for."""
        return _least(self.waited_ms(), group)

    def waited_ms(self) -> list[float]:
        """Of this rank alone, milliseconds one by one: what `exposed_ms` counts, time for late ranks included."""
        if any(not span.cuda for span in self.spans):
            return [span.ms() for span in self.spans]
        return [span.ms() for span in self.waits] + self._behind_ms()

    def _behind_ms(self) -> list[float]:
        """One number for each backward collective: what it adds to the time that those before it left exposed."""
        if not self.behind:
            return []
        origin, covered, found = self.behind[0][0], 0.0, []
        for idle, done in self.behind:
            begin, end = max(covered, origin.elapsed_time(idle)), origin.elapsed_time(done)
            found.append(max(0.0, end - begin))
            covered = max(covered, end)
        return found


def _least(times_ms: list[float], group: ProcessGroup) -> float:
    """Sum over collectives of the least time over ranks."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, times_ms, group=group)
    return sum(min(times) for times in zip(*everyone, strict=True))


@contextmanager
def watch_exchange() -> Iterator[ExchangeProbe]:
    """Measure the exchanges of the steps inside."""
    global _active
    probe = _active = ExchangeProbe()
    try:
        yield probe
    finally:
        _active = None


@contextmanager
def collective(payload: Tensor, layers: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Wraps one collective of the exchange. `layers`: in backward, the stream on which the layers ran before it."""
    probe = _active
    if probe is None:
        yield
        return
    idle = layers.record_event(torch.cuda.Event(enable_timing=True)) if layers is not None else None
    span = Span(payload.is_cuda)
    yield
    span.stop()
    probe.spans.append(span)
    if idle is not None:
        probe.behind.append((idle, span.end))


@contextmanager
def waiting() -> Iterator[None]:
    """Wraps the point where the layers' stream waits for the rows (CUDA)."""
    probe = _active
    if probe is None:
        yield
        return
    span = Span(cuda=True)
    yield
    span.stop()
    probe.waits.append(span)

"""How long a call takes: on a GPU many calls as one CUDA graph, on a CPU single calls by the host's clock.

In a training step a kernel's inputs come from memory; repeated calls would find them in the L2 cache. So a graph holds
as many calls, each on buffers of its own and with outputs that stay, as together exceed the cache twice, and what is
left in it is driven out before every replay. The calls last a millisecond or more: beside that neither the start of a
replay counts nor what is still in the cache at its end and not yet written. The microsecond or so from one kernel of a
graph to the next is part of the time.

For a gradient the forward passes are a graph of their own, replayed before each timed one: backward passes may write
into what forward passes kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from egmla_megatron.bench.roofline.case import Call, Case
from egmla_megatron.bench.roofline.cost import Cost, Machine

__all__ = ["GraphTimer", "HostTimer", "Timer", "Times", "calls_of_graph"]

WARM_UP = 3  # calls before the capture, and replays that do not count
LEAST_S = 1e-3  # of a replay, were it as fast as can be
MOST_CALLS, FEW_CALLS = 256, 4
MEMORY_PER_BYTE = 4  # buffers, what forward passes keep and temporary memory / bytes of a call's cost
MEMORY_SHARE = 0.4  # of what is free


@dataclass(frozen=True)
class Times:
    """Microseconds of one call, measured several times."""

    us: tuple[float, ...]
    calls: int  # in each measurement


@dataclass(frozen=True)
class HostTimer:
    """Calls one after the other by the host's clock."""

    repeats: int

    def __call__(self, case: Case) -> Times:
        """The first call does not count."""
        found = [_host_us(case.prepare()) for _ in range(self.repeats + 1)]
        return Times(tuple(found[1:]), 1)


def _host_us(call: Call) -> float:
    state = call.before() if call.before else None
    started = time.perf_counter()
    call.run(state)
    return (time.perf_counter() - started) * 1e6


def calls_of_graph(cost: Cost, machine: Machine, cache_bytes: int, free_bytes: int) -> int:
    """How many calls of a kernel a graph holds.

    Args:
        cache_bytes: of the L2 cache.
        free_bytes: of the device's memory.
    """
    most = int(free_bytes * MEMORY_SHARE / (MEMORY_PER_BYTE * cost.bytes))
    wanted = max(2 * cache_bytes / cost.bytes, LEAST_S / machine.bound_s(cost), FEW_CALLS)
    return max(1, min(math.ceil(wanted), MOST_CALLS, most))


class GraphTimer:
    """Calls captured on the current stream, which must not be the default one.

    Args:
        repeats: timed replays.
        machine: decides how many calls a graph holds.
    """

    def __init__(self, repeats: int, machine: Machine, device: torch.device) -> None:
        self.repeats, self.machine, self.device = repeats, machine, device
        self.cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.scratch = torch.ones(self.cache_bytes, device=device)  # four times the cache: 4 bytes an element

    def __call__(self, case: Case) -> Times:
        """Whatever fails, fails: nothing is timed in another way instead."""
        try:
            for _ in range(WARM_UP):
                call = case.prepare()
                call.run(call.before() if call.before else None)
            del call
            calls = self._count(case)
            return Times(self._replay([case.prepare() for _ in range(calls)]), calls)
        except Exception as error:
            error.add_note(f"while timing {case.title}")
            raise

    def _count(self, case: Case) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return calls_of_graph(case.cost, self.machine, self.cache_bytes, free)

    def _replay(self, calls: list[Call]) -> tuple[float, ...]:
        pool = torch.cuda.graph_pool_handle()
        forward: torch.cuda.CUDAGraph | None = None
        states: list[Any] = [None] * len(calls)
        befores = [call.before for call in calls if call.before is not None]
        if befores:
            forward, states = _captured(lambda: [before() for before in befores], pool)
        # results are kept until here, so that every call writes to memory of its own
        timed, written = _captured(lambda: [call.run(state) for call, state in zip(calls, states, strict=True)], pool)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + self.repeats)]
        for start, end in pairs:
            if forward is not None:
                forward.replay()
            self.scratch.sum()  # read, not written: nothing remains that the timed kernels would have to write back
            start.record()
            timed.replay()
            end.record()
        torch.cuda.synchronize(self.device)
        found = tuple(start.elapsed_time(end) * 1e3 / len(calls) for start, end in pairs[WARM_UP:])
        del written
        for graph in (timed, forward):
            if graph is not None:
                graph.reset()
        return found


def _captured(work: Callable[[], list[Any]], pool: Any) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """The graph of `work` and what it returned."""
    graph = torch.cuda.CUDAGraph()
    # other threads of the process (watchdogs of communicators) may call CUDA meanwhile
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        results = work()
    return graph, results


Timer = HostTimer | GraphTimer

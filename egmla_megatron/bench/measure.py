"""One variant on one rank: built, warmed up, timed, counted, and gone."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from egmla_megatron.bench.batches import micro_batches
from egmla_megatron.bench.collectives import CollectiveCounter
from egmla_megatron.bench.link import interface_in_use, sent_by_interface, synchronize
from egmla_megatron.bench.probe import ExchangeTimes, timed_exchange
from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.build import build_model
from egmla_megatron.parallel.world import World, seed_everything
from egmla_megatron.train.optimizer import build_optimizer, build_schedule, wrap_ddp
from egmla_megatron.train.reporter import StepReporter
from egmla_megatron.train.sinks import Sinks
from egmla_megatron.train.step import StepInFlight, graphed_passes, launch_step, train_step

__all__ = ["Measurement", "measure"]

_MIB = 2**20


@dataclass(frozen=True)
class Measurement:
    """What one rank found for one variant in one round."""

    step_ms: list[float]
    losses: list[float]  # warm-up and timed steps
    peak_mib: float | None  # allocated by torch on a GPU for this variant, at most; None on a CPU
    peak_rss_mib: float | None  # resident memory of the process meanwhile (Linux), other variants' left-overs included
    sent_bytes: float  # in one step, counted
    collectives: dict[str, int]  # in that step: name -> calls over more than one rank
    sent_by_collective: dict[str, float]  # bytes of each name
    wire_bytes: float | None  # in one step by the network interface, this rank's share; None: not known which one
    exchange: list[ExchangeTimes] = field(default_factory=list)


@dataclass(frozen=True)
class _Flight:
    """A launched step."""

    settle: Callable[[], float]  # waits for its end and gives the loss
    finished: bool  # it has ended


@dataclass(frozen=True)
class _Steps:
    """Functions that train one step of a run."""

    launch: Callable[[], _Flight]  # as the run would do it
    eager: Callable[[], float]  # never as a CUDA graph, inside which nothing can be counted; the loss
    bytes_before: int  # that torch had allocated before the run was built
    release: Callable[[], None]  # gives the run's memory up


def _steps(cfg: RunConfig, world: World, dataset: Any, sinks: Sinks | None) -> _Steps:
    cuda = world.device.type == "cuda"
    before = torch.cuda.memory_allocated(world.device) if cuda else 0
    seed_everything(cfg.run.seed, world)
    built = build_model(cfg, world)
    model = wrap_ddp(cfg, built, world)
    optimizer = build_optimizer(cfg, model, built)
    build_schedule(cfg, optimizer, 0)
    batches = micro_batches(cfg, world, dataset)
    graph = graphed_passes(cfg, world, model)
    reporter = None if sinks is None else StepReporter(cfg, world, model, sinks)
    times, meanwhile = None, None
    if reporter is not None:
        batches, times, meanwhile = reporter.watch(batches), reporter.times, reporter.meanwhile

    def launch() -> StepInFlight:
        return launch_step(cfg, world, model, optimizer, batches, graph, times, meanwhile)

    def release() -> None:
        if graph is not None:
            graph.release()
        for chunk in model:
            chunk.release()

    def plain() -> _Flight:
        flight = launch()
        return _Flight(lambda: flight.result().loss, flight.finished)

    return _Steps(
        launch=plain if reporter is None else _reported(reporter, launch, cfg.optimizer.lr),
        eager=lambda: train_step(cfg, world, model, optimizer, batches).loss,
        bytes_before=before,
        release=release,
    )


def _reported(reporter: StepReporter, launch: Callable[[], StepInFlight], lr: float) -> Callable[[], _Flight]:
    """A step with what the trainer does around it."""
    numbers = itertools.count(1)

    def one_step() -> _Flight:
        reporter.begin()
        flight = launch()
        launched = reporter.launched()

        def settle() -> float:
            result = flight.result()
            reporter.end(next(numbers), launched, result, lr)
            return result.loss

        return _Flight(settle, flight.finished)

    return one_step


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # not Linux, or /proc not writable
        Path("/proc/self/clear_refs").write_text("5")


def _peak_rss_mib() -> float | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return None


def _run(launch: Callable[[], _Flight], world: World, steps: int) -> list[tuple[float, float]]:
    """(ms, loss) of every step, from the end of the one before it to its own; as in the trainer, a step is launched
    before the one before it has ended, where it can be."""
    synchronize(world.device)
    found: list[tuple[float, float]] = []
    ahead, launched, before = False, 0, time.perf_counter()
    flights: deque[_Flight] = deque()
    while len(found) < steps:
        while launched < steps and len(flights) <= ahead:
            flights.append(launch())
            launched, ahead = launched + 1, not flights[-1].finished
        loss = flights.popleft().settle()
        now = time.perf_counter()
        found.append(((now - before) * 1e3, loss))
        before = now
    synchronize(world.device)
    return found


def measure(cfg: RunConfig, world: World, dataset: Any, schedule: Schedule, sinks: Sinks | None = None) -> Measurement:
    """Called by every rank; the memory of the run is free again afterwards, also where it could not be built.

    Args:
        sinks: of this rank, to which every step is reported as the trainer does; None: steps alone.
    """
    try:
        return _build_and_measure(cfg, world, dataset, schedule, sinks)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their variables hold the model for as long as the error is known
        raise
    finally:
        gc.collect()  # modules and parameters refer to each other
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def _build_and_measure(
    cfg: RunConfig, world: World, dataset: Any, schedule: Schedule, sinks: Sinks | None
) -> Measurement:
    steps = _steps(cfg, world, dataset, sinks)
    try:
        return _measure(cfg, world, steps, schedule)
    finally:
        steps.release()


def _measure(cfg: RunConfig, world: World, steps: _Steps, schedule: Schedule) -> Measurement:
    cuda = world.device.type == "cuda"
    _reset_peaks(world.device)  # before the warm-up: a CUDA graph takes its memory there, when it is captured
    warmed = _run(steps.launch, world, schedule.warmup)
    interface = interface_in_use(dist.get_backend())
    dist.barrier(group=world.control)
    before = sent_by_interface(interface)
    ran = _run(steps.launch, world, schedule.measured)
    dist.barrier(group=world.control)  # the last step's bytes of this machine's other ranks are out, too
    after = sent_by_interface(interface)
    peak = (torch.cuda.max_memory_allocated(world.device) - steps.bytes_before) / _MIB if cuda else None
    rss = _peak_rss_mib()
    with CollectiveCounter() as counter:
        steps.eager()
    wire = None
    if before is not None and after is not None:
        wire = (after - before) / len(ran) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    calls: dict[str, int] = {}
    sent: dict[str, float] = {}
    for each in counter.found:
        if each.ranks > 1:
            calls[each.name] = calls.get(each.name, 0) + 1
            sent[each.name] = sent.get(each.name, 0.0) + each.sent_bytes
    probed = [timed_exchange(steps.eager, world) for _ in range(schedule.probed)] if cfg.parallel.gate_group > 1 else []
    return Measurement(
        step_ms=[ms for ms, _ in ran[1:-1]],
        losses=[loss for _, loss in warmed + ran],
        peak_mib=peak,
        peak_rss_mib=rss,
        sent_bytes=counter.sent_bytes,
        collectives=calls,
        sent_by_collective=sent,
        wire_bytes=wire,
        exchange=probed,
    )

"""Throughput, utilisation and memory of a run."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch
from egmla_megatron.report.cards import PEAK_BF16_FLOPS
from egmla_megatron.report.rates import Workload

__all__ = ["Memory", "Phases", "SeenIds", "Throughput", "dense_peak_flops", "memory_of"]


def dense_peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the card in use in FLOP/s; None where it is not known (CPU, other cards)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for card, peak in PEAK_BF16_FLOPS.items() if card in name), None)


@dataclass(frozen=True)
class Memory:
    """The most that this rank had so far, in MiB."""

    peak_mib: float  # allocated by torch on a GPU, resident set on a CPU
    reserved_mib: float | None  # taken from the GPU by torch's allocator; None on a CPU


def memory_of(device: torch.device) -> Memory:
    """Memory of this rank so far."""
    if device.type == "cuda":
        found = torch.cuda.memory_stats_as_nested_dict(device)  # once, and not flattened and sorted: every step asks
        allocated, reserved = (found[name]["all"]["peak"] / 2**20 for name in ("allocated_bytes", "reserved_bytes"))
        return Memory(allocated, reserved)
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return Memory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale, None)


class Phases:
    """Seconds that the loop spent in each of its phases."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("training", "warmup", "evaluation", "checkpoint", "profile"), 0.0)
        self.started = time.perf_counter()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """What runs inside belongs to this phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def totals(self) -> dict[str, float]:
        """All phases as `NAME_s`, and `total_s` since the beginning; logging and the like are in no phase."""
        return {f"{name}_s": seconds for name, seconds in self.seconds.items()} | {
            "total_s": time.perf_counter() - self.started
        }


class SeenIds:
    """Counts the distinct ids of the micro-batches that pass through `watch` (of this rank)."""

    def __init__(self) -> None:
        self.distinct = self.tokens = 0

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same micro-batches."""
        for batch in batches:
            if batch.distinct_ids:
                self.distinct += batch.distinct_ids
                self.tokens += batch.tokens_BS.numel()
            yield batch

    def take(self) -> tuple[int, int]:
        """(distinct ids, tokens) of the micro-batches since the last call; none where nothing was counted."""
        found = self.distinct, self.tokens
        self.distinct = self.tokens = 0
        return found


@dataclass
class Throughput:
    """Turns step times into rates. The first `warmup` steps of a start do not count in the totals."""

    work: Workload
    ranks: int
    peak_flops: float | None  # of one card
    warmup: int
    steps: int = 0
    all_s: float = 0.0  # seconds of all steps
    counted: int = 0  # steps after warm-up
    counted_s: float = 0.0  # seconds of those

    @classmethod
    def of(cls, cfg: RunConfig, ranks: int, device: torch.device) -> Throughput:
        """For a configuration on `ranks` devices."""
        return cls(
            work=Workload.of(cfg),
            ranks=ranks,
            peak_flops=dense_peak_flops(device),
            warmup=cfg.logging.warmup_steps,
        )

    def add(self, seconds: float, *, profiled: bool = False) -> dict[str, float | None]:
        """Record one step; returns its rates. Profiled steps are slower, and count no more than those of warm-up."""
        self.steps += 1
        self.all_s += seconds
        if self.steps > self.warmup and not profiled:
            self.counted += 1
            self.counted_s += seconds
        return {"step_time_s": seconds, **self._rates(seconds)}

    def _rates(self, seconds: float) -> dict[str, float | None]:
        return self.work.rates(seconds, self.ranks, self.peak_flops).named()

    def mean_step_s(self) -> float:
        """Mean time of a counted step, or of all steps when none counts yet; in seconds."""
        if self.counted:
            return self.counted_s / self.counted
        return self.all_s / self.steps if self.steps else 0.0

    def mean_rates(self) -> dict[str, float | None]:
        """Rates at the mean time of the counted steps; None before there is one."""
        if not self.counted:
            return dict.fromkeys(self._rates(1.0))
        return self._rates(self.mean_step_s())

"""Throughput, utilisation and memory of a run."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch
from egmla_megatron.model.count import flops_per_token
from egmla_megatron.report.cards import PEAK_BF16_FLOPS

__all__ = ["SeenIds", "Throughput", "dense_peak_flops", "peak_memory_mib"]


def dense_peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the card in use in FLOP/s; None where it is not known (CPU, other cards)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for card, peak in PEAK_BF16_FLOPS.items() if card in name), None)


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory of this rank in MiB: allocated by torch on a GPU, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


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

    def take_fraction(self) -> float | None:
        """Distinct ids per token since the last call, mean over micro-batches; None where nothing was counted."""
        fraction = self.distinct / self.tokens if self.tokens else None
        self.distinct = self.tokens = 0
        return fraction


@dataclass
class Throughput:
    """Turns step times into rates. The first `warmup` steps of a start do not count in the totals."""

    tokens_per_step: int
    ranks: int
    flops_per_token: float  # forward and backward
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
            tokens_per_step=cfg.train.global_batch_size * cfg.train.seq_length,
            ranks=ranks,
            flops_per_token=flops_per_token(cfg.model, cfg.train.seq_length).forward_backward,
            peak_flops=dense_peak_flops(device),
            warmup=cfg.logging.warmup_steps,
        )

    def add(self, seconds: float) -> dict[str, float | None]:
        """Record one step; returns its rates."""
        self.steps += 1
        self.all_s += seconds
        if self.steps > self.warmup:
            self.counted += 1
            self.counted_s += seconds
        rate = self.tokens_per_step / seconds
        flops = rate / self.ranks * self.flops_per_token
        return {
            "step_time_s": seconds,
            "tokens_per_second": rate,
            "tokens_per_second_per_rank": rate / self.ranks,
            "tflops_per_second_per_rank": flops / 1e12,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
        }

    def mean_step_s(self) -> float:
        """Mean time of a counted step, or of all steps when none counts yet; in seconds."""
        if self.counted:
            return self.counted_s / self.counted
        return self.all_s / self.steps if self.steps else 0.0

    def tokens_per_second(self) -> float | None:
        """Mean rate over the counted steps; None before there is one."""
        return self.tokens_per_step / self.mean_step_s() if self.counted else None

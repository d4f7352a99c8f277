"""What all ranks tell each other once per step, in one small all-reduce that hides behind the step."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from egmla_megatron.train.metrics import Memory

__all__ = ["Agreed", "Mean", "StepAgreement", "node_names"]

_MOST_RANKS = 1 << 20  # times a whole number below 2**33 is exact in a float64
_LARGEST = (1 << 33) - 1


@dataclass(frozen=True)
class Agreed:
    """The same on all ranks."""

    signal: int  # the stop signal that one of them got, 0: none
    save_now: bool
    peak_memory_mib: int  # of the rank with the most
    peak_memory_rank: int
    reserved_memory_mib: int | None  # None: a CPU
    reserved_memory_rank: int | None
    slowest_rank: int | None  # None: not measured, or no step yet
    slowest_rank_busy_s: float | None
    fastest_rank_busy_s: float | None


class Mean:
    """Mean of what was added since the last `clear`."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        """One more."""
        self.total += value
        self.count += 1

    def value(self) -> float | None:
        """None: nothing was added."""
        return self.total / self.count if self.count else None

    def clear(self) -> None:
        """Forget all."""
        self.total, self.count = 0.0, 0


class StepAgreement:
    """The maximum over ranks of what each says during its step; `result` waits for it when the step is over.

    Args:
        group: of all ranks, on the host.
        busy_s: mean time that this rank worked in a step lately (`Split.busy`); None on all ranks or on none.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, *, signal: int, save_now: bool, memory: Memory, busy_s: float | None
    ) -> None:
        self.busy_known, self.reserved_known = busy_s is not None, memory.reserved_mib is not None
        busy_us = round((busy_s or 0.0) * 1e6)
        named = (memory.peak_mib, memory.reserved_mib or 0.0, busy_us)
        values = [signal, save_now, -busy_us, *(_with_rank(value, rank) for value in named)]
        self.values = torch.tensor([float(value) for value in values], dtype=torch.float64)
        self.work = dist.all_reduce(self.values, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> Agreed:
        """Waits for the last rank to have spoken."""
        assert self.work is not None
        self.work.wait()
        signal, save_now, fastest, *named = self.values.tolist()
        (peak, peak_rank), (reserved, reserved_rank), (busy, slowest) = (divmod(int(x), _MOST_RANKS) for x in named)
        return Agreed(
            signal=int(signal),
            save_now=bool(save_now),
            peak_memory_mib=peak,
            peak_memory_rank=peak_rank,
            reserved_memory_mib=reserved if self.reserved_known else None,
            reserved_memory_rank=reserved_rank if self.reserved_known else None,
            slowest_rank=slowest if self.busy_known else None,
            slowest_rank_busy_s=busy / 1e6 if self.busy_known else None,
            fastest_rank_busy_s=-fastest / 1e6 if self.busy_known else None,
        )


def _with_rank(value: float, rank: int) -> int:
    """One number whose maximum over ranks also says whose it is."""
    return min(round(value), _LARGEST) * _MOST_RANKS + rank


def node_names(group: dist.ProcessGroup) -> Sequence[str]:
    """Host name of every rank. Called by all of them, once."""
    names: list[Any] = [""] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return names

"""The link between the ranks: how fast it is, and what really went over it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from egmla_megatron.parallel.world import World

__all__ = ["LinkSpeed", "interface_in_use", "measure_link", "sent_by_interface", "synchronize"]

_MIB = 2**20


@dataclass(frozen=True)
class LinkSpeed:
    """Bus bandwidth of an all-reduce over all ranks."""

    gb_per_s: float  # 1e9 bytes a second that one rank sends, median
    payload_mib: int
    n: int  # repetitions


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_link(world: World, repetitions: int = 5) -> LinkSpeed:
    """Median bus bandwidth of an all-reduce over all ranks: bytes that a rank sends / time, by the slowest rank."""
    mib = 256 if world.device.type == "cuda" else 4
    payload = torch.zeros(mib * _MIB // 4, device=world.device)
    seconds = []
    for _ in range(repetitions + 1):
        dist.barrier(group=world.control)
        synchronize(world.device)
        started = time.perf_counter()
        dist.all_reduce(payload)
        synchronize(world.device)
        seconds.append(time.perf_counter() - started)
    del payload
    mine = torch.tensor(seconds[1:])  # the first one connects
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=world.control)
    sent = 2 * mib * _MIB * (world.size - 1) / world.size
    return LinkSpeed(sent / statistics.median(mine.tolist()) / 1e9, mib, repetitions)


def interface_in_use(backend: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Network interface that carries all collectives, where the environment fixes one; None: not known."""
    if backend == "gloo":
        name = environ.get("GLOO_SOCKET_IFNAME", "")
    else:
        name = environ.get("NCCL_SOCKET_IFNAME", "") if environ.get("NCCL_NET") == "Socket" else ""
    name = name.removeprefix("=")
    return name or None


def sent_by_interface(name: str | None) -> int | None:
    """Bytes that this machine (or its network namespace) has sent by an interface, headers included.

    /proc/self/net knows this process's namespace, which /sys does not unless it was mounted there.
    """
    if name is None:
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        label, _, counters = line.partition(":")
        if label.strip() == name:
            return int(counters.split()[8])
    return None

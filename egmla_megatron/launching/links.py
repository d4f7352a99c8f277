"""`python -m egmla_megatron.launching.links` on all ranks, through the launcher: how fast are their links?

The all-reduce of all ranks is the figure that training sees. A slow node slows all of it and does not show there, so
neighbours also exchange data pair by pair: a node is slow when even its best link is.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from egmla_megatron.environment import whole_number
from egmla_megatron.errors import UserError
from egmla_megatron.launching.facts import node_name
from egmla_megatron.launching.nodes import LIMIT_S

__all__ = ["main", "rounds_of_pairs", "slow_nodes"]

SLOW = 0.5  # a node whose best link is below this part of the median is named
_REPEATS = 3
_MIB = 1 << 20


def rounds_of_pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Every node with its neighbours in a ring, each node in at most one pair of a round."""
    if nodes < 2:
        return []
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else 1)]
    even, odd, rest = ring[0 : nodes - nodes % 2 : 2], ring[1 : nodes - nodes % 2 : 2], ring[nodes - nodes % 2 :]
    return [pairs for pairs in (even, odd, rest) if pairs]


def slow_nodes(rates: Mapping[tuple[int, int], float], nodes: int) -> dict[int, tuple[float, float]]:
    """Node -> (its best link, the median of all nodes' best links), of those far below that median.

    A healthy neighbour of a slow node has another link that is fast. Two nodes have one link: none can be named.
    """
    best = [max((rate for pair, rate in rates.items() if node in pair), default=0.0) for node in range(nodes)]
    median = statistics.median(best)
    return {node: (rate, median) for node, rate in enumerate(best) if nodes > 2 and rate < SLOW * median}


class _Deadline:
    """Names the nodes that are behind when the measurement does not end in time, and ends this process."""

    def __init__(self, store: Any, rank: int, names: Sequence[str], limit_s: float) -> None:
        self.store, self.rank, self.names, self.limit_s = store.clone(), rank, names, limit_s
        self.ended = threading.Event()
        self.reach("connected")
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def reach(self, stage: str) -> None:
        """This rank has come so far."""
        self.store.set(f"links/{stage}/{self.rank}", "1")
        self.stage = stage

    def _watch(self) -> None:
        if self.ended.wait(self.limit_s):
            return
        ranks = range(len(self.names))
        behind = sorted({self.names[rank] for rank in ranks if not self.store.check([f"links/{self.stage}/{rank}"])})
        who = ", ".join(behind) or "a link"
        print(
            f"error: {self.names[self.rank]}: {who} held up the measurement of the links ({self.stage}) for "
            f"{self.limit_s:.0f} s; look at that node's network, or leave it out (sbatch --exclude)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)


def main() -> int:
    """Measure and print. Returns the exit code.

    Raises:
        UserError: slower than EGMLA_LEAST_GB_PER_S.
    """
    import torch
    import torch.distributed as dist

    rank, size = whole_number("RANK", 0, 0), whole_number("WORLD_SIZE", 1, 1)
    local_size = whole_number("LOCAL_WORLD_SIZE", 1, 1)
    limit_s = float(whole_number("EGMLA_PREFLIGHT_S", LIMIT_S, 1))
    timeout = timedelta(seconds=limit_s + 30)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", whole_number("LOCAL_RANK", 0, 0)) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    store.set(f"links/name/{rank}", node_name())
    names = [store.get(f"links/name/{other}").decode() for other in range(size)]
    deadline = _Deadline(store, rank, names, limit_s)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timeout,
        device_id=device if cuda else None,
    )  # fmt: skip
    whole = _all_reduce_gb_per_s(device, size)
    deadline.reach("all-reduce")
    rates = _pairs_gb_per_s(device, rank, local_size, size // local_size)
    deadline.reach("pairs")
    deadline.ended.set()
    dist.destroy_process_group()
    return _report(whole, rates, names[::local_size], size) if rank == 0 else 0


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _all_reduce_gb_per_s(device: Any, size: int) -> float:
    """Bus bandwidth (1e9 bytes that a rank sends, a second) by the slowest rank, median of a few."""
    import torch
    import torch.distributed as dist

    mib = 256 if device.type == "cuda" else 1
    payload = torch.zeros(mib * _MIB // 4, device=device)
    seconds = []
    for _ in range(_REPEATS + 1):
        dist.all_reduce(torch.zeros(1, device=device))
        _wait(device)
        started = time.perf_counter()
        dist.all_reduce(payload)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(seconds[1:], device=device)  # the first one connects
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 2 * mib * _MIB * (size - 1) / size / statistics.median(slowest.tolist()) / 1e9


def _pairs_gb_per_s(device: Any, rank: int, local_size: int, nodes: int) -> dict[tuple[int, int], float]:
    """Rate of every pair of neighbours, all ranks of two nodes at once, each with its peer; of the slowest rank."""
    import torch
    import torch.distributed as dist

    node = rank // local_size
    mib = 64 if device.type == "cuda" else 1
    rates: dict[tuple[int, int], float] = {}
    for pairs in rounds_of_pairs(nodes):
        mine = next((pair for pair in pairs if node in pair), None)
        peer = None if mine is None else (mine[0] + mine[1] - node) * local_size + rank % local_size
        seconds = torch.zeros(nodes, device=device)
        seconds[node] = min([_swap(device, mib, peer) for _ in range(_REPEATS)][1:])  # the first one connects
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        for first, second in pairs:
            slowest = max(float(seconds[first]), float(seconds[second]))
            rates[first, second] = mib * _MIB * local_size / slowest / 1e9
    return rates


def _swap(device: Any, mib: int, peer: int | None) -> float:
    """Seconds in which this rank and its peer have sent each other their data; every rank calls it."""
    import torch
    import torch.distributed as dist

    out, into = torch.zeros(mib * _MIB // 4, device=device), torch.zeros(mib * _MIB // 4, device=device)
    dist.all_reduce(torch.zeros(1, device=device))
    _wait(device)
    started = time.perf_counter()
    if peer is not None:
        swap = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        _wait(device)
    return time.perf_counter() - started


def _report(whole: float, rates: Mapping[tuple[int, int], float], names: Sequence[str], size: int) -> int:
    print(f"links    all-reduce over {size} ranks on {len(names)} nodes: {whole:.3f} GB/s", flush=True)
    for node, (rate, median) in slow_nodes(rates, len(names)).items():
        print(
            f"warning: {names[node]} is slow: {rate:.3f} GB/s to its neighbours, {median:.3f} GB/s is usual here; "
            f"leave it out (sbatch --exclude={names[node]})",
            file=sys.stderr,
            flush=True,
        )
    least = os.environ.get("EGMLA_LEAST_GB_PER_S", "")
    if least and whole < float(least):
        slow = ", ".join(names[node] for node in slow_nodes(rates, len(names))) or "no node stands out"
        raise UserError(
            f"links: got an all-reduce at {whole:.3f} GB/s, allowed at least {least} (SITE_LEAST_GB_PER_S); "
            f"slow: {slow}"
        )
    return 0


if __name__ == "__main__":
    from egmla_megatron.cli import run_main

    run_main(main)

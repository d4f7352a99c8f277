"""The ranks of a run: process groups, created once and passed explicitly from here on."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from egmla_megatron.config.check import Layout
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.parallel import cpu
from egmla_megatron.parallel.agreement import agree_on_config
from egmla_megatron.parallel.heap import map_large_blocks

__all__ = [
    "World",
    "close_world",
    "form_groups",
    "open_world",
    "rank_environment",
    "seed_everything",
    "use_capturable_stream",
]


@dataclass(frozen=True)
class World:
    """Who this process is and which groups it belongs to."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    layout: Layout
    groups: ProcessGroupCollection  # megatron-core's groups: tp, pp, cp, dp, ep, expt_dp, ...
    gate: ProcessGroup  # gate group: W ranks that share one sharded table, own communicator
    gate_replicas: ProcessGroup  # ranks with the same columns of the same tables
    gate_shards: tuple[tuple[int, int], ...]  # (data-parallel rank, context-parallel rank) of each gate group member
    control: ProcessGroup  # gloo group of all ranks for flags and objects: never touches the GPU
    store: Any  # key-value store of the rendezvous, for signs of life

    @property
    def is_first(self) -> bool:
        """True on the rank that logs and writes."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Index among the ranks that read different data."""
        return self.groups.dp.rank()

    @property
    def is_last_stage(self) -> bool:
        """True where the loss is computed."""
        return self.groups.pp.rank() == self.groups.pp.size() - 1


def rank_environment() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them; a bare process is rank 0 of 1."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))


def _choose_device(local_rank: int, deterministic: bool) -> torch.device:
    if not torch.cuda.is_available():
        cpu.install()
        map_large_blocks()
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True)
    return torch.device("cuda", local_rank)


def _own_communicator(ranks_of_mine: list[int], size: int, timeout: timedelta) -> ProcessGroup:
    """A second group over the same ranks: sharing a communicator with DDP serialises the two."""
    everyone: list[list[int] | None] = [None] * size
    dist.all_gather_object(everyone, ranks_of_mine)
    mine = None
    for ranks in sorted({tuple(ranks) for ranks in everyone if ranks}):
        group = dist.new_group(list(ranks), timeout=timeout)
        if ranks == tuple(ranks_of_mine):
            mine = group
    assert mine is not None
    return mine


def _data_shards(groups: ProcessGroupCollection, gate: ProcessGroup, size: int) -> tuple[tuple[int, int], ...]:
    """Which part of the data every member of the gate group reads: its loader can then know the others' ids."""
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (groups.dp.rank(), groups.cp.rank()))
    return tuple(everyone[rank] for rank in dist.get_process_group_ranks(gate))


def use_capturable_stream(cfg: RunConfig, device: torch.device) -> None:
    """Where steps become CUDA graphs: what is made from here on must belong to the stream that is captured, which must
    not be the default one.

    Raises:
        UserError: torch knows no GPU, though the driver does.
    """
    if not cfg.train.cuda_graph:
        return
    if device.type != "cuda":
        raise UserError(
            "train.cuda_graph: got true, allowed false where torch sees no CUDA device (is it a build for CPUs?); set "
            "train.cuda_graph=false"
        )
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        torch.cuda.set_stream(torch.cuda.Stream(device))


def open_world(cfg: RunConfig, layout: Layout) -> World:
    """Start the process groups. Call once, after `check_config` said the layout can work.

    Raises:
        UserError: the ranks were started with different configurations.
    """
    rank, size, local_rank = rank_environment()
    device = _choose_device(local_rank, cfg.run.deterministic)
    use_capturable_stream(cfg, device)
    timeout = timedelta(seconds=cfg.train.collective_timeout_s)
    store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    agree_on_config(store, rank, size, cfg)
    _connect(store, rank, size, device, timeout)
    return form_groups(cfg, layout, local_rank, device, store)


def _connect(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)


def _connect_anew(store: Any, device: torch.device, timeout: timedelta) -> None:
    """End every group of an earlier layout with its threads, connections and buffers. Called by every rank.

    megatron-core only forgets its groups: a process with twenty layouts behind it had a thousand threads.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_state.destroy_model_parallel()
    number = store.add(f"layouts/{rank}", 1)
    dist.barrier()
    store.add(f"layouts/left/{number}", 1)
    while store.add(f"layouts/left/{number}", 0) < size:  # a connection must not close while a rank still reads from it
        time.sleep(0.01)
    dist.destroy_process_group()
    _connect(dist.PrefixStore(f"layouts/{number}", store), rank, size, device, timeout)


def form_groups(cfg: RunConfig, layout: Layout, local_rank: int, device: torch.device, store: Any) -> World:
    """Divide the ranks that are already connected by the layout; ends the groups of an earlier layout, which nobody may
    use any more."""
    timeout = timedelta(seconds=cfg.train.collective_timeout_s)
    if parallel_state.is_initialized():
        _connect_anew(store, device, timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.gate_group,
        expert_tensor_parallel_size=1,  # the default, TP, gives silently wrong table gradients
        distributed_timeout_minutes=max(1, int(cfg.train.collective_timeout_s // 60)),
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    gate = groups.ep
    if layout.gate_group > 1:
        gate = _own_communicator(dist.get_process_group_ranks(groups.ep), size, timeout)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        device=device,
        layout=layout,
        groups=groups,
        gate=gate,
        gate_replicas=groups.expt_dp,
        gate_shards=_data_shards(groups, gate, size),
        control=dist.new_group(backend="gloo", timeout=timeout),
        store=store,
    )


def seed_everything(seed: int, world: World) -> None:
    """Seed torch and megatron-core's RNG tracker: dropout differs between data-parallel ranks and pipeline stages,
    and, inside the tracker's fork, between tensor-parallel ranks."""
    own = (seed + 1_000_003 * world.groups.dp_cp.rank() + 7_919 * world.groups.pp.rank()) % 2**32
    torch.manual_seed(own)
    tensor_parallel.model_parallel_cuda_manual_seed(own)


def close_world() -> None:
    """Destroy every group; safe to call when nothing was opened."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()

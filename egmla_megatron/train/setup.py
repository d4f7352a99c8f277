"""Everything a run needs before its first step, in the order in which mistakes are cheapest to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from egmla_megatron.attention.gate_ids import GatePlan
from egmla_megatron.checkpoint.choose import choose_checkpoint, own_checkpoints, warn_of_damaged
from egmla_megatron.checkpoint.load import load_checkpoint
from egmla_megatron.checkpoint.manifest import NONE, mark_damaged, read_manifest, warn_of
from egmla_megatron.checkpoint.verify import (
    Changed,
    describe_changed,
    find_changed,
    refuse_changed,
    still_changed,
    unreadable,
)
from egmla_megatron.config.check import Layout
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch, DataShare, batch_iterator
from egmla_megatron.data.dataset import Datasets, build_datasets, micro_batch_indices
from egmla_megatron.data.validation import validation_samples
from egmla_megatron.errors import MachineError
from egmla_megatron.model.build import BuiltModel, build_model
from egmla_megatron.parallel.together import together
from egmla_megatron.parallel.world import World, seed_everything
from egmla_megatron.train.lock import lock_run_dir
from egmla_megatron.train.optimizer import build_optimizer, build_schedule, wrap_ddp
from egmla_megatron.train.resume import check_same_order, nothing_to_train
from egmla_megatron.train.run_dir import write_config

__all__ = [
    "Claim",
    "Prepared",
    "claim",
    "data_share",
    "device_name",
    "prepare",
    "training_batches",
    "validation_batches",
]


@dataclass(frozen=True)
class Prepared:
    """A run ready for its next step."""

    cfg: RunConfig
    world: World
    built: BuiltModel
    model: list[Any]  # the DDP-wrapped chunks
    optimizer: Any
    schedule: Any
    datasets: Datasets
    start_step: int  # optimizer steps done before
    resumed_from: str  # checkpoint folder, empty: a fresh start
    optimizer_has_states: bool  # loaded; else it makes them in its first step
    lock: IO[str] | None = None  # on rank 0: holds the run folder as long as it is open
    unmarked: Mapping[Path, str] = NONE  # see Claim


@dataclass(frozen=True)
class Claim:
    """A run folder that is this job's own."""

    lock: IO[str] | None  # on rank 0: holds the folder as long as it is open
    checkpoint: Path | None  # to start from, None: from the beginning
    complete: str  # empty, or in words why there is nothing to train
    unmarked: Mapping[Path, str] = NONE  # newer ones whose bytes changed, with the reason, which could not be marked


def claim(cfg: RunConfig, world: World) -> Claim:
    """Make the run folder this job's own, choose its newest whole checkpoint. Called by every rank, which all get
    rank 0's answer: another rank may not see a fresh folder or line on a shared disk yet.

    A checkpoint of the run whose bytes changed is marked, and the one before it chosen: a run that nobody watches loses
    some steps by it, not the time until somebody looks. Marked only where rank 0 sees the change, too: one node whose
    disk, mount or memory fails would condemn every checkpoint of the run.

    Raises:
        UserError: on every rank; another job is there, no checkpoint can be used, a rank cannot read, or it alone sees
            a change.
    """
    claimed = _first_s_answer(world, lambda: _claim(cfg))
    while cfg.checkpoint.verify and claimed.checkpoint is not None and not claimed.complete:
        path = claimed.checkpoint
        if path.parent != own_checkpoints(cfg):
            refuse_changed(path, world)  # somebody has just named it, and may name another
            break
        found = find_changed(path, world)
        if not found:
            break
        claimed = _first_s_answer(world, partial(_pass_over, cfg, claimed, path, found))
    return claimed


def _first_s_answer(world: World, action: Callable[[], Claim]) -> Claim:
    mine = together(world, lambda: action() if world.is_first else Claim(None, None, ""))
    answer: list[Any] = [mine.checkpoint, mine.complete, dict(mine.unmarked)]
    dist.broadcast_object_list(answer, src=0, group=world.control)
    return Claim(mine.lock, *answer)


def _pass_over(cfg: RunConfig, claimed: Claim, path: Path, found: Sequence[Changed]) -> Claim:
    """The claim without the checkpoint `path`, which every later start passes over as well, where it can be marked.
    Rank 0 calls it."""
    why, unmarked = describe_changed(found), claimed.unmarked
    _refuse_one_node_s_word(path, found, why)
    try:
        mark_damaged(path, why)
    except OSError as error:  # a full or read-only disk
        unmarked = {**unmarked, path: f"{why}; it could not be marked: {error.strerror}"}
    warn_of(path, unmarked.get(path, why))
    checkpoint = choose_checkpoint(cfg, unmarked)
    if checkpoint is not None:
        check_same_order(cfg, checkpoint, read_manifest(checkpoint))
    return Claim(claimed.lock, checkpoint, nothing_to_train(cfg, checkpoint), unmarked)


def _refuse_one_node_s_word(path: Path, found: Sequence[Changed], why: str) -> None:
    """Read what others found changed again, here.

    Raises:
        UserError: it is whole here, or cannot be read.
    """
    try:
        agreed = still_changed(path, found)
    except OSError as error:
        raise unreadable(path, 0, error) from error
    if not agreed:
        who = ", ".join(f"rank {rank} on {host}" for rank, host in sorted({(each.rank, each.host) for each in found}))
        raise MachineError(
            f"checkpoint: {path} reads as changed on {who} ({why}), but is whole where rank 0 reads it again: nothing "
            "was marked; suspect the memory, the disk cache or the mount of that node, leave it out and start again "
            "(checkpoint.verify=false: load it as it is)"
        )


def prepare(cfg: RunConfig, world: World, claimed: Claim) -> Prepared:
    """Build the run on this rank and load its checkpoint. Called by every rank.

    Raises:
        UserError: on every rank, where one of them cannot go on.
    """
    checkpoint = claimed.checkpoint
    seed_everything(cfg.run.seed, world)
    datasets = _datasets(cfg, world.layout)
    built = build_model(cfg, world)
    model = wrap_ddp(cfg, built, world)
    optimizer = build_optimizer(cfg, model, built)
    start, has_states = 0, False
    if checkpoint is not None:
        manifest = load_checkpoint(cfg, world, built, optimizer, checkpoint, datasets.fingerprint)
        start, has_states = manifest.step, not manifest.weights_only
    if world.is_first:
        write_config(cfg)  # not before: a refused start leaves the configuration of the run that is there
    return Prepared(
        cfg=cfg,
        world=world,
        built=built,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(cfg, optimizer, start),
        datasets=datasets,
        start_step=start,
        resumed_from=str(checkpoint or ""),
        optimizer_has_states=has_states,
        lock=claimed.lock,
        unmarked=claimed.unmarked,
    )


def _claim(cfg: RunConfig) -> Claim:
    """Make the run folder this job's own, and recognisable as a run's.

    The checkpoint is chosen behind the lock: a job that just ended there may have saved since the start's checks.
    """
    path = Path(cfg.run.dir)
    if not (path / "config.yaml").is_file():
        write_config(cfg)
    lock, checkpoint = lock_run_dir(path), choose_checkpoint(cfg)
    warn_of_damaged(cfg)
    return Claim(lock, checkpoint, nothing_to_train(cfg, checkpoint))


def _datasets(cfg: RunConfig, layout: Layout) -> Datasets:
    datasets = build_datasets(cfg)
    if datasets.valid is not None:
        validation_samples(cfg, layout, len(datasets.valid))  # now, not after days of training
    return datasets


def data_share(cfg: RunConfig, world: World) -> DataShare:
    """Which tokens this rank reads, and how its gate group looks them up."""
    dp_rank, cp_rank = world.dp_rank, world.groups.cp.rank()
    plan = None
    if cfg.model.gated:
        plan = GatePlan(
            members=world.gate_shards,
            mine=world.gate.rank(),
            exchange=cfg.parallel.gate_exchange,
            unique=cfg.parallel.unique_ids,
            vocab_size=cfg.model.vocab_size,
        )
    return DataShare(cfg.model.vocab_size, dp_rank, cp_rank, world.groups.cp.size(), plan)


def training_batches(run: Prepared) -> Iterator[Batch]:
    """This rank's micro-batches from the resumed position on, endless."""
    cfg, world = run.cfg, run.world
    share = data_share(cfg, world)
    indices = micro_batch_indices(
        run.start_step * cfg.train.global_batch_size,
        None,
        len(run.datasets.train),
        micro_batch=cfg.train.micro_batch_size,
        dp_ranks=share.dp_ranks,
        dp_size=world.layout.dp,
    )
    return batch_iterator(run.datasets.train, indices, world.device, num_workers=cfg.data.num_workers, share=share)


def validation_batches(run: Prepared) -> tuple[Iterator[Batch], int]:
    """(this rank's micro-batches of one evaluation, their number); the same samples every time."""
    cfg, world = run.cfg, run.world
    assert run.datasets.valid is not None
    available = len(run.datasets.valid)
    samples = validation_samples(cfg, world.layout, available)
    micro_batch, dp, share = cfg.train.micro_batch_size, world.layout.dp, data_share(cfg, world)
    indices = micro_batch_indices(0, samples, available, micro_batch=micro_batch, dp_ranks=share.dp_ranks, dp_size=dp)
    batches = batch_iterator(run.datasets.valid, indices, world.device, num_workers=0, share=share)
    return batches, samples // (micro_batch * dp)


def device_name(device: torch.device) -> str:
    """Name for logs: the card's, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

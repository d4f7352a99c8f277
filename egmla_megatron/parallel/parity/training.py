"""Five steps of a case, and what is compared afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch, batch_iterator
from egmla_megatron.data.dataset import micro_batch_indices
from egmla_megatron.model.build import BuiltModel, build_model
from egmla_megatron.model.names import global_names
from egmla_megatron.parallel.world import World, seed_everything
from egmla_megatron.train.deferred_rows import complete_rows
from egmla_megatron.train.optimizer import build_optimizer, build_schedule, wrap_ddp
from egmla_megatron.train.setup import data_share
from egmla_megatron.train.step import evaluate, train_step

__all__ = ["STEPS", "TABLE", "Snapshot", "named_parameters", "sample_batches", "train_case"]

STEPS = 5
SAMPLES = 48
TABLE = "gate_table.weight"
Snapshot = dict[str, Any]  # numbers by name; `initial`, `gradient`, `weight`: tensors by parameter


class _RandomSamples:
    """Random sequences; the loss mask has holes where the run's loss may have them."""

    config = SimpleNamespace(reset_position_ids=False)  # what the loader asks of megatron-core's data sets

    def __init__(self, cfg: RunConfig) -> None:
        generator, length = torch.Generator().manual_seed(5), cfg.train.seq_length
        self.ids_NS = torch.randint(cfg.model.vocab_size, (SAMPLES, length + 1), generator=generator)
        self.mask_NS = (torch.rand(SAMPLES, length, generator=generator) > 0.3 * cfg.data.eod_mask_loss).float()

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids_S = self.ids_NS[number]
        return {"tokens": ids_S[:-1], "labels": ids_S[1:], "loss_mask": self.mask_NS[number]}


def sample_batches(cfg: RunConfig, world: World, first: int, *, planned: bool = True) -> Iterator[Batch]:
    """This rank's micro-batches of random samples from number `first` on, through the trainer's own loader.

    planned: with the rows of the gating tables.
    """
    share = data_share(cfg, world)
    micro_batch, dp = cfg.train.micro_batch_size, world.layout.dp
    chosen = micro_batch_indices(first, None, SAMPLES, micro_batch=micro_batch, dp_ranks=share.dp_ranks, dp_size=dp)
    batches = batch_iterator(_RandomSamples(cfg), chosen, world.device, num_workers=0, share=share)
    return batches if planned else (replace(batch, gate_ids=None) for batch in batches)


def named_parameters(built: BuiltModel) -> dict[str, Any]:
    """Parameters by global name; `gate_table.weight@1` is the table of the stage's second chunk."""
    return {
        f"{TABLE}@{chunk}" if name == TABLE else name: parameter
        for chunk, module in enumerate(built.chunks)
        for name, parameter in global_names(module)
    }


def _whole_gradients(model: list[Any]) -> None:
    """After a distributed optimizer's reduce-scatter every rank holds its shard of a bucket: bring them together."""
    for group in [group for chunk in model for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]:
        if not group.ddp_config.use_distributed_optimizer:
            continue
        members = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            mine = bucket.grad_data.chunk(members.size())[members.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=members)


def _copies(named: dict[str, Any]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def train_case(cfg: RunConfig, world: World, *, planned: bool = True) -> tuple[Snapshot, dict[str, Any]]:
    """Loss, gradients and norm of the first step, without clipping; weights after four more with it.

    Returns the snapshot and this rank's parameters by name.
    """
    seed_everything(cfg.run.seed, world)
    built = build_model(cfg, world)
    model = wrap_ddp(cfg, built, world)
    optimizer = build_optimizer(cfg, model, built)
    schedule = build_schedule(cfg, optimizer, 0)
    named = named_parameters(built)
    snapshot: Snapshot = {"initial": _copies(named)}

    def keep_gradients() -> None:
        _whole_gradients(model)
        snapshot["gradient"] = {name: parameter.main_grad.clone() for name, parameter in named.items()}

    stream = sample_batches(cfg, world, 0, planned=planned)
    step = train_step(cfg, world, model, optimizer, stream, meanwhile=keep_gradients)
    snapshot |= {"loss": step.loss, "grad_norm": step.grad_norm}
    clipped = replace(cfg, optimizer=replace(cfg.optimizer, clip_grad=step.grad_norm / 3))
    for number in range(1, STEPS):
        schedule.step(1)
        stream = sample_batches(cfg, world, number * cfg.train.global_batch_size, planned=planned)
        step = train_step(clipped, world, model, optimizer, stream)
    snapshot |= {"last_loss": step.loss, "last_grad_norm": step.grad_norm}
    microbatches = world.layout.num_microbatches
    snapshot["evaluation"] = evaluate(cfg, world, model, sample_batches(cfg, world, 0), microbatches)
    complete_rows(optimizer)
    snapshot["weight"] = _copies(named)
    return snapshot, named

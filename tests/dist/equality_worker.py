"""Worker: trains every case for three steps and compares with the serial reference, or writes that reference.

    equality_worker.py FOLDER [REFERENCE_FOLDER]

Every rank compares its own part of every tensor, so replicas that drift apart are seen too.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from egmla_megatron.config.check import check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch, batch_iterator
from egmla_megatron.data.dataset import micro_batch_indices
from egmla_megatron.model.build import build_model
from egmla_megatron.model.names import global_names
from egmla_megatron.parallel.world import World, close_world, form_groups, open_world, seed_everything
from egmla_megatron.train.optimizer import build_optimizer, build_schedule, wrap_ddp
from egmla_megatron.train.setup import data_share
from egmla_megatron.train.step import evaluate, train_step
from tests.dist.layouts import COMPARED, cases, run_config

SAMPLES = 24
Snapshot = dict[str, Any]


class RandomSamples:
    """Random sequences; the loss mask has holes, so that micro-batches weigh differently many tokens."""

    config = SimpleNamespace(reset_position_ids=False)  # what the loader asks of megatron-core's data sets

    def __init__(self, cfg: RunConfig) -> None:
        generator, length = torch.Generator().manual_seed(5), cfg.train.seq_length
        self.ids_NS = torch.randint(cfg.model.vocab_size, (SAMPLES, length + 1), generator=generator)
        self.mask_NS = (torch.rand(SAMPLES, length, generator=generator) > 0.3).float()

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids_S = self.ids_NS[number]
        return {"tokens": ids_S[:-1], "labels": ids_S[1:], "loss_mask": self.mask_NS[number]}


def batches(cfg: RunConfig, world: World, first: int) -> Iterator[Batch]:
    """The trainer's own loader on random samples."""
    share = data_share(cfg, world)
    micro_batch, dp = cfg.train.micro_batch_size, world.layout.dp
    chosen = micro_batch_indices(first, None, SAMPLES, micro_batch=micro_batch, dp_ranks=share.dp_ranks, dp_size=dp)
    return batch_iterator(RandomSamples(cfg), chosen, world.device, num_workers=0, share=share)


def whole_gradients(model: Any) -> None:
    """After a distributed optimizer's reduce-scatter every rank holds its shard of a bucket: bring them together."""
    for group in model.bucket_groups + model.expert_parallel_bucket_groups:
        if not group.ddp_config.use_distributed_optimizer:
            continue
        members = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            mine = bucket.grad_data.chunk(members.size())[members.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=members)


def train(cfg: RunConfig, world: World) -> tuple[Snapshot, dict[str, Any]]:
    """Initial weights, loss, gradients and norm of one step without clipping; weights after two more with it.

    Returns the snapshot and the parameters by global name.
    """
    seed_everything(cfg.run.seed, world)
    built = build_model(cfg, world)
    model = wrap_ddp(cfg, built, world)
    optimizer = build_optimizer(cfg, model, built)
    schedule = build_schedule(cfg, optimizer, 0)
    named = dict(global_names(built.module))
    snapshot: Snapshot = {"initial": copies(named)}
    step = train_step(cfg, world, model, optimizer, batches(cfg, world, 0))
    whole_gradients(model)
    snapshot |= {"loss": step.loss, "grad_norm": step.grad_norm}
    snapshot["gradient"] = {name: parameter.main_grad.clone() for name, parameter in named.items()}
    clipped = replace(cfg, optimizer=replace(cfg.optimizer, clip_grad=step.grad_norm / 3))
    for number in (1, 2):
        schedule.step(1)
        stream = batches(cfg, world, number * cfg.train.global_batch_size)
        step = train_step(clipped, world, model, optimizer, stream)
    snapshot |= {"last_loss": step.loss, "last_grad_norm": step.grad_norm}
    snapshot["evaluation"] = evaluate(cfg, world, model, batches(cfg, world, 0), world.layout.num_microbatches)
    snapshot["weight"] = copies(named)
    return snapshot, named


def copies(named: dict[str, Any]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def part(whole: Tensor, name: str, parameter: Any, cfg: RunConfig, world: World) -> Tensor:
    """The part of a whole tensor that this rank should hold, worked out from the layout alone."""
    if name == "gate_table.weight":
        columns = whole.shape[2] // world.layout.gate_group
        layers = world.layout.layers_per_stage
        first_layer, first_column = world.groups.pp.rank() * layers, world.gate.rank() * columns
        return whole[:, first_layer : first_layer + layers, first_column : first_column + columns]
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    tp, rank, axis = world.layout.tp, world.groups.tp.rank(), parameter.partition_dim
    if cfg.model.attention == "mla" and name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp, axis)[rank] for half in whole.chunk(2, 0)])  # [gate; up] of SwiGLU
    return whole.chunk(tp, axis)[rank]


def compare(mine: Snapshot, serial: Snapshot, named: dict[str, Any], cfg: RunConfig, world: World) -> dict[str, Any]:
    """Worst error of each kind: relative for numbers, relative to the tensor's largest element for tensors."""
    errors: dict[str, Any] = {
        key: abs(mine[key] - serial[key]) / abs(serial[key])
        for key in ("loss", "grad_norm", "last_loss", "last_grad_norm", "evaluation")
    }
    for kind in ("initial", "gradient", "weight"):
        worst = (-1.0, "")
        for name, tensor in mine[kind].items():
            whole = serial[kind][name]
            expected = part(whole, name, named[name], cfg, world)
            assert tensor.shape == expected.shape, (name, tensor.shape, expected.shape)
            scale = max(whole.abs().max().item(), 1e-3)
            worst = max(worst, ((tensor - expected).abs().max().item() / scale, name))
        errors[kind], errors[f"{kind}_at"] = worst
    return errors


def drifted(named: dict[str, Any], world: World) -> list[str]:
    """Parameters that are not bit-identical on all ranks that hold a copy of them."""
    found = []
    for name, parameter in named.items():
        if name == "gate_table.weight":
            groups = [world.gate_replicas]
        elif getattr(parameter, "tensor_model_parallel", False):
            groups = [world.groups.dp]
        else:
            groups = [world.groups.dp, world.groups.tp]
        digest = hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for group in groups:
            digests: list[Any] = [None] * group.size()
            dist.all_gather_object(digests, digest, group=group)
            if len(set(digests)) > 1:
                found.append(name)
    return found


def run_case(cfg: RunConfig, world: World, serial: Snapshot | None) -> tuple[Snapshot, dict[str, Any]]:
    """(snapshot, errors against `serial`) of one model under one layout."""
    snapshot, named = train(cfg, world)
    found: dict[str, Any] = {"drifted": drifted(named, world)}
    if serial is not None:
        found |= compare(snapshot, serial, named, cfg, world)
    return snapshot, found


def all_cases(base: World, serial: dict[str, Snapshot]) -> dict[str, Any]:
    """Errors of every case. Cases of one layout follow each other: forming groups costs more than training."""
    runs = {name: run_config(*name) for name in cases()}
    found: dict[str, Any] = {}
    world = base
    for (model, layout), cfg in sorted(runs.items(), key=lambda item: str(check_config(item[1], base.size))):
        wanted = check_config(cfg, base.size)
        if wanted != world.layout:
            world = form_groups(cfg, wanted, base.local_rank, base.device, base.store)
        print(f"rank {base.rank}: {model} {layout}", flush=True)  # read when a case fails or hangs
        found[f"{model}-{layout}"] = run_case(cfg, world, serial.get(model))[1]
    return found


def main(folder: Path, reference: Path | None) -> None:
    first = run_config("mla", "serial")
    base = open_world(first, check_config(first, int(os.environ.get("WORLD_SIZE", "1"))))
    found: dict[str, Any] = {}
    if reference is None:
        serial = {model: run_case(run_config(model, "serial"), base, None)[0] for model in COMPARED}
        torch.save(serial, folder / "serial.pt")
    else:
        found = all_cases(base, torch.load(reference / "serial.pt"))
    (folder / f"rank{base.rank}.json").write_text(json.dumps(found))
    close_world()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(220, exit=True)  # a hang says where
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)

"""Logits of a training checkpoint computed by the training model itself, to hold an export against."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from egmla_megatron.checkpoint.load import load_weights
from egmla_megatron.checkpoint.manifest import find_checkpoint, read_manifest
from egmla_megatron.checkpoint.state import model_state
from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import from_dict
from egmla_megatron.config.schema import ParallelConfig, RunConfig
from egmla_megatron.model.build import build_model
from egmla_megatron.parallel.world import close_world, open_world, seed_everything

__all__ = ["megatron_logits"]


_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _single_rank(cfg: RunConfig) -> RunConfig:
    """The run's configuration for one rank in fp32, with the plain torch layers."""
    train = replace(cfg.train, precision="fp32", fp8="none", recompute="none", cuda_graph=False)
    train = replace(train, micro_batch_size=1, global_batch_size=1)
    return replace(cfg, parallel=ParallelConfig(implementation="torch"), train=train)


@contextmanager
def _alone() -> Iterator[None]:
    """Hides a launcher's ranks (torchrun's, Slurm's) from this process, which is one rank of its own."""
    hidden = {
        key: os.environ.pop(key) for key in list(os.environ) if key in _OF_RANKS or key.startswith("TORCHELASTIC_")
    }
    try:
        yield
    finally:
        for key in _OF_RANKS:
            os.environ.pop(key, None)
        os.environ.update(hidden)


@torch.no_grad()
def megatron_logits(where: str | Path, ids_BS: Tensor, rounded_to: torch.dtype | None = None) -> list[Tensor]:
    """Token ids [B,S] -> fp32 logits [B,S,vocab] on the CPU, from a checkpoint of any layout.

    rounded_to: gives a second tensor of logits, computed (in fp32, too) after rounding every weight to this dtype.
    Opens process groups of one rank and closes them again: call it in a process that has none.
    """
    path = find_checkpoint(Path(where))
    cfg = _single_rank(from_dict(read_manifest(path).config))
    with _alone():
        world = open_world(cfg, check_config(cfg, 1))
    try:
        seed_everything(cfg.run.seed, world)
        built = build_model(cfg, world)
        loaded = dist_checkpointing.load({"model": model_state(built, world)}, str(path))
        load_weights(built, loaded["model"], path)
        built.module.eval()
        ids = ids_BS.to(world.device)
        positions = torch.arange(ids.shape[1], device=world.device)[None].expand(ids.shape[0], -1)
        logits = [built.module(ids, positions, None).float().cpu()]
        if rounded_to is not None:
            for parameter in built.module.parameters():
                parameter.copy_(parameter.to(rounded_to))
            logits.append(built.module(ids, positions, None).float().cpu())
        return logits
    finally:
        close_world()

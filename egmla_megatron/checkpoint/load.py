"""Reads checkpoints: into a running model at any layout, or whole weights on one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from egmla_megatron.checkpoint.choose import check_compatible
from egmla_megatron.checkpoint.manifest import (
    Manifest,
    find_checkpoint,
    read_manifest,
)
from egmla_megatron.checkpoint.state import chunk_name, model_state, optimizer_state, restore_rng, rng_state
from egmla_megatron.checkpoint.stored import StoredWeights
from egmla_megatron.checkpoint.verify import refuse_changed
from egmla_megatron.config.load import from_dict
from egmla_megatron.config.schema import ModelConfig, RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.model.build import BuiltModel
from egmla_megatron.parallel.world import World, seed_everything
from egmla_megatron.train.optimizer import adopt_hyperparameters, gather_weights, loading_states

__all__ = ["load_checkpoint", "load_weights", "read_full_weights", "read_weights"]

READ_ERRORS: tuple[type[BaseException], ...] = (
    CheckpointException,
    CheckpointingException,
    OSError,
    RuntimeError,
    EOFError,
    KeyError,
    ValueError,
)


def load_checkpoint(
    cfg: RunConfig, world: World, built: BuiltModel, optimizer: Any, path: Path, data_fingerprint: str
) -> Manifest:
    """Load weights, optimizer and random generators. Every rank calls it; train/setup.py has looked for changed bytes.

    The generators belong to ranks: under another layout they are seeded anew, differently for every step. A checkpoint
    of weights alone leaves the optimizer fresh.
    """
    manifest = read_manifest(path)
    check_compatible(cfg, path, manifest, data_fingerprint)
    if manifest.weights_only:
        _read_weights(built, world, path)
        optimizer.reload_model_params()  # its fp32 copies
        seed_everything(cfg.run.seed + manifest.step, world)
        return manifest
    now = asdict(world.layout)
    same_ranks = all(manifest.layout[axis] == now[axis] for axis in ("world_size", "tp", "pp", "cp"))
    model = model_state(built, world)
    with loading_states(cfg, optimizer):
        state: dict[str, Any] = {"model": model}
        state["optimizer"] = optimizer_state(optimizer, model, world, loading=True)
        if same_ranks:
            state["rng"] = rng_state(world)
        loaded = _read(state, path)
        adopt_hyperparameters(loaded["optimizer"], optimizer)
        load_weights(built, loaded["model"], path)
        optimizer.load_state_dict(loaded["optimizer"])  # after the weights: some follow from their master weights
        gather_weights(cfg, optimizer)
    if same_ranks:
        restore_rng(loaded["rng"])
    else:
        seed_everything(cfg.run.seed + manifest.step, world)
    return manifest


def read_weights(built: BuiltModel, world: World, path: Path) -> None:
    """Weights alone, of a checkpoint of any layout. Every rank calls it."""
    refuse_changed(path, world)
    _read_weights(built, world, path)


def _read_weights(built: BuiltModel, world: World, path: Path) -> None:
    load_weights(built, _read({"model": model_state(built, world)}, path)["model"], path)


def _read(state: dict[str, Any], path: Path) -> Any:
    try:
        return dist_checkpointing.load(state, str(path))
    except READ_ERRORS as error:
        if isinstance(error, torch.OutOfMemoryError | dist.DistError):
            raise
        reason = " ".join(str(error).split())[-300:]
        raise UserError(
            f"checkpoint: {path} cannot be read ({type(error).__name__}: {reason}); rename it to go on "
            "from the checkpoint before it"
        ) from error


def load_weights(built: BuiltModel, weights: Mapping[str, Any], path: Path) -> None:
    """Put loaded weights (as `model_state`) into the model. Raises UserError naming what is missing or left over."""
    for index, chunk in enumerate(built.chunks):
        missing, unexpected = chunk.load_state_dict(weights[chunk_name(index)], strict=False)
        missing = [name for name in missing if not name.endswith("_extra_state")]
        if missing or unexpected:
            raise UserError(
                f"checkpoint: {path} does not fit the model: missing {missing[:4]}, unexpected {unexpected[:4]}"
            )


def read_full_weights(where: str | Path) -> tuple[dict[str, Tensor], ModelConfig, Manifest]:
    """Whole, unsharded weights of a checkpoint of any layout, on one process without process groups.

    Args:
        where: a checkpoint folder, or a run folder (its newest complete checkpoint).

    Returns:
        Weights by megatron-core name with the layer's number in it, the model configuration, the manifest.
    """
    path = find_checkpoint(Path(where))
    manifest = read_manifest(path)
    weights = {name: stored[:] for name, stored in StoredWeights(path).items()}
    return weights, from_dict(manifest.config).model, manifest

"""The sharded state of a run: model, optimizer, random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from egmla_megatron.checkpoint.buckets import mend_padded_buckets
from egmla_megatron.model.build import BuiltModel
from egmla_megatron.parallel.world import World

__all__ = ["chunk_name", "model_state", "optimizer_state", "restore_rng", "rng_state"]


def model_state(built: BuiltModel, world: World) -> dict[str, Any]:
    """Sharded tensors of every chunk of the model, under `chunk_name`. Their keys and offsets know the layers of the
    whole model only, so the number of chunks may differ when they are loaded. Extra states of Transformer Engine (FP8
    only) are left out, so that TE and torch layers read each other's checkpoints."""
    found = {}
    for index, chunk in enumerate(built.chunks):
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": world.groups.dp_cp})
        found[chunk_name(index)] = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    return found


def chunk_name(index: int) -> str:
    """Key of a chunk in `model_state`."""
    return f"chunk_{index}"


def optimizer_state(optimizer: Any, model: dict[str, Any], world: World, *, loading: bool) -> dict[str, Any]:
    """Sharded tensors of the optimizer, in the form that loads at any layout."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": world.groups.dp_cp,
    }
    state = optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    if not loading:
        mend_padded_buckets(optimizer, state)
    return state


def rng_state(world: World) -> ShardedObject:
    """This rank's generators; only meaningful for the same number of ranks."""
    data = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng_state", data, (world.size,), (world.rank,), replica_id=0)


def restore_rng(data: dict[str, Any]) -> None:
    """Inverse of `rng_state`."""
    random.setstate(data["python"])
    np.random.set_state(data["numpy"])
    torch.set_rng_state(data["torch"])
    if data["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(data["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(data["tracker"])

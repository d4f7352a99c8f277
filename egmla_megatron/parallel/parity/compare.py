"""A rank's part of a training against the same training on one rank."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.parallel.parity.training import TABLE, Snapshot
from egmla_megatron.parallel.parity.verdict import NUMBER_ERROR, TENSOR_ERROR
from egmla_megatron.parallel.world import World

__all__ = ["compare", "drifted", "own_part"]


def own_part(whole: Tensor, name: str, parameter: Any, cfg: RunConfig, world: World) -> Tensor:
    """The part of a whole tensor that this rank should hold, worked out from the layout alone."""
    base, _, chunk = name.partition("@")
    layout = world.layout
    if base == TABLE:
        columns, layers = whole.shape[2] // layout.gate_group, layout.layers_per_stage // layout.vp
        layer = (int(chunk) * layout.pp + world.groups.pp.rank()) * layers
        column = world.gate.rank() * columns
        return whole[:, layer : layer + layers, column : column + columns]
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    rank, axis = world.groups.tp.rank(), parameter.partition_dim
    if cfg.model.attention == "mla" and name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(layout.tp, axis)[rank] for half in whole.chunk(2, 0)])  # [gate; up] of SwiGLU
    return whole.chunk(layout.tp, axis)[rank]


def compare(mine: Snapshot, serial: Snapshot, named: dict[str, Any], cfg: RunConfig, world: World) -> dict[str, Any]:
    """Worst error of each kind, and for tensors the parameter that has it."""
    errors: dict[str, Any] = {key: abs(mine[key] - serial[key]) / abs(serial[key]) for key in NUMBER_ERROR}
    for kind in ("initial", *TENSOR_ERROR):
        worst = (-1.0, "")
        for name, tensor in mine[kind].items():
            whole = serial[kind][f"{TABLE}@0" if name.startswith(TABLE) else name]
            expected = own_part(whole, name, named[name], cfg, world)
            if tensor.shape != expected.shape:
                raise AssertionError(f"{name}: got {tuple(tensor.shape)}, expected {tuple(expected.shape)}")
            error = (tensor - expected).abs().max().item() / max(whole.abs().max().item(), 1e-3)
            worst = max(worst, (error if math.isfinite(error) else math.inf, name))  # no maximum sees a NaN
        errors[kind], errors[f"{kind}_at"] = worst
    return errors


def drifted(named: dict[str, Any], world: World) -> list[str]:
    """Parameters that are not bit-identical on all ranks that hold a copy of them."""
    found = []
    for name, parameter in named.items():
        if name.startswith(TABLE):
            groups = [world.gate_replicas]
        elif getattr(parameter, "tensor_model_parallel", False):
            groups = [world.groups.dp_cp]
        else:
            groups = [world.groups.dp_cp, world.groups.tp]
        digest = hashlib.sha256(parameter.detach().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        for group in groups:
            digests: list[Any] = [None] * group.size()
            dist.all_gather_object(digests, digest, group=group)
            if len(set(digests)) > 1:
                found.append(name)
    return found

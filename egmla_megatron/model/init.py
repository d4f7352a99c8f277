"""Initial weights that do not depend on the layout.

Every tensor is drawn whole from a generator seeded by the run's seed and the tensor's global name, and each
rank keeps its part: TP, PP, DP and W change nothing (on one kind of device).
"""

from __future__ import annotations

import zlib
from typing import Any, cast

import torch
from torch import Tensor, nn

from egmla_megatron.attention.token_table import GateTable
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.errors import UserError
from egmla_megatron.model.names import global_names
from egmla_megatron.parallel.world import World

__all__ = ["initialize_weights", "weight_std"]

TABLE = "gate_table.weight"


def weight_std(name: str, model: ModelConfig) -> float | None:
    """Standard deviation of a weight; None: a norm or bias, which keeps its constant.

    Matrices that write into the residual stream are scaled by 1/sqrt(2 * layers) (GPT-2). The gate's
    projection is scaled so that gates have std 1 (mul) or the std of the up-projected latent (add): with
    0.02 throughout, the product's variance would be below the LayerNorm's eps.
    """
    if name.endswith("bias") or "norm" in name.rsplit(".", 2)[-2] or "norm_weight" in name:
        return None
    if name == TABLE:
        return model.gate_table_init_std
    if name.endswith("gate_proj_weight"):
        gate_stds = {"mul": 1.0, "add": float(model.init_std * model.kv_lora_rank**0.5)}
        if model.gate not in gate_stds:
            raise UserError(f"model.gate: got {model.gate!r}, allowed {', '.join(gate_stds)}; give the new one a std")
        gate_std = gate_stds[model.gate]
        return gate_std / (model.gate_table_init_std * float(model.kv_emb_dim**0.5))
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return model.init_std / float((2 * model.num_layers) ** 0.5)
    return model.init_std


def _draw(name: str, shape: tuple[int, ...], std: float, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63)
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)


def _part(full: Tensor, parameter: Any, gated_mlp: bool, world: World) -> Tensor:
    """This rank's part of a whole dense tensor; a SwiGLU's [gate; up] is cut half by half."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    tp = world.groups.tp
    halves = full.chunk(2, 0) if gated_mlp else (full,)
    return torch.cat([half.chunk(tp.size(), parameter.partition_dim)[tp.rank()] for half in halves], 0)


def _fill_table(table: GateTable, model: ModelConfig, seed: int) -> None:
    """One layer at a time: the whole table of a large model would not fit beside the model."""
    parameter, first = table.weight, table.layer_offset
    vocab, layers, columns = parameter.shape
    begin = table.group.rank() * columns
    for layer in range(layers):
        shape = (vocab, model.kv_emb_dim)
        full = _draw(f"{TABLE}.{first + layer}", shape, model.gate_table_init_std, seed, parameter.device)
        parameter[:, layer].copy_(full[:, begin : begin + columns])


@torch.no_grad()
def initialize_weights(module: nn.Module, model: ModelConfig, seed: int, world: World) -> None:
    """Fill every weight of a chunk, an `EGMLAModel` (or megatron-core GPTModel), in place."""
    for name, parameter in global_names(module):
        if name == TABLE:
            _fill_table(cast(GateTable, module.gate_table), model, seed)
            continue
        std = weight_std(name, model)
        if std is None:
            continue
        shape = list(parameter.shape)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= world.groups.tp.size()
        full = _draw(name, tuple(shape), std, seed, parameter.device)
        gated_mlp = model.attention == "mla" and name.endswith("mlp.linear_fc1.weight")  # the MHA baseline has a GELU
        parameter.copy_(_part(full, parameter, gated_mlp, world))

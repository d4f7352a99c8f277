"""kv = LayerNorm(W_UKV c * W_UE e): the module in the `linear_kv_up_proj` slot of an MLA spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from egmla_megatron.attention.head_sizes import HeadSizes
from egmla_megatron.attention.main_gradient import linear
from egmla_megatron.attention.sum_by_row import sum_by_row, unpack_row_map

__all__ = ["GATES", "Gate", "GateInput", "GatedKVUp", "HeadsInput", "gate_by_row", "layer_norm_over_tp"]

# S sequence, B batch, T = S * B tokens, U rows (distinct ids), N = heads * (nope + v) / TP columns of this rank,
# D gate embedding width


@dataclass(frozen=True)
class Gate:
    """How a gate acts on the up-projected latent, element by element, and its derivatives."""

    combine: Callable[[Tensor, Tensor], Tensor]  # (latent, gate) -> gated
    gradients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (gradient, latent, gate) -> of both
    kernel: str | None = None  # its name in gate_parts_cuda; None: by single operations on GPUs too


class GateInput(NamedTuple):
    """What a layer gates with."""

    rows_UD: Tensor  # gate embeddings of the micro-batch's rows
    row_map: Tensor | None  # row of every token in sequence-first order (`pack_row_map`), None: row t is token t's


class HeadsInput(NamedTuple):
    """What queries, keys and values are made of beside the up-projected latent, as `split_heads_cuda.split_heads`."""

    q: Tensor
    rope_SBR: Tensor
    angles_SR: Tensor
    heads: int  # of this rank
    sizes: HeadSizes

    def split(self, kv_SBN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value."""
        from egmla_megatron.attention.split_heads_cuda import split_heads

        return split_heads(self.q, kv_SBN, self.rope_SBR, self.angles_SR, self.heads, self.sizes)


# name of ModelConfig.gate -> the gate; a new variant is one entry here
GATES: dict[str, Gate] = {
    "mul": Gate(torch.mul, lambda grad, up, gate: (grad * gate, grad * up), "mul"),
    "add": Gate(torch.add, lambda grad, up, gate: (grad, grad), "add"),
}


class _GateByRow(torch.autograd.Function):
    """combine(up[t], gate[index[t]]): the gates of the tokens are never saved, only those of the rows."""

    @staticmethod
    def forward(ctx: Any, up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, gate: Gate) -> Tensor:
        ctx.save_for_backward(up_TN, gate_UN, row_map)
        ctx.gate = gate
        return gate.combine(up_TN, gate_UN.index_select(0, row_map[: len(up_TN)]))

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor, Tensor, None, None]:
        up_TN, gate_UN, row_map = ctx.saved_tensors
        rows = unpack_row_map(row_map, len(up_TN))
        grad_up_TN, grad_gate_TN = ctx.gate.gradients(grad_TN, up_TN, gate_UN.index_select(0, rows.index_T))
        return grad_up_TN, sum_by_row(grad_gate_TN, rows), None, None


def gate_by_row(up_SBN: Tensor, gate_UN: Tensor, row_map: Tensor | None, gate: Gate) -> Tensor:
    """Each token gated by its row, tokens in sequence-first order; row_map None: row t on token t.

    up [S,B,N], gates of the rows [U,N], row map of the S * B tokens (`pack_row_map`) -> gated [S,B,N].
    """
    if row_map is None:
        return gate.combine(up_SBN, gate_UN.view_as(up_SBN))
    return _GateByRow.apply(up_SBN.flatten(0, 1), gate_UN, row_map, gate).view_as(up_SBN)


def layer_norm_over_tp(x_SBN: Tensor, weight_N: Tensor, bias_N: Tensor, eps: float, group: ProcessGroup) -> Tensor:
    """LayerNorm over the columns of all ranks of `group`, in fp32; weight and bias are this rank's columns.

    Ranks share mean and variance through one all-reduce of three numbers per token. The variance is
    combined from rank-local variances and means (Chan's formula), which does not cancel as E[x^2] - E[x]^2.
    """
    x = x_SBN.float()
    mean, variance = x.mean(-1), x.var(-1, unbiased=False)
    local = torch.stack([mean, variance, mean * mean])
    # every rank uses the sum, so the gradient of the sum is again summed over ranks: reduce, then copy
    total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(local, group), group)
    mean, variance, mean_square = (total / group.size()).unbind()
    variance = variance + (mean_square - mean * mean).clamp_min(0)  # fp32 may round below it
    normed = (x - mean[..., None]) * torch.rsqrt(variance[..., None] + eps)
    return (normed * weight_N.float() + bias_N.float()).to(x_SBN.dtype)


class GatedKVUp(MegatronModule):
    """Up-projection of the latent, gate, and LayerNorm over all heads (paper equations 2 to 5, appendix C).

    The layer sets `gate_input` for the length of one forward and clears it: nothing that belongs to a micro-batch
    outlives the call, which recomputation with two micro-batches in flight depends on. `before_gate`, set once, is
    called before the rows are read: the rows may still be on their way.

    Args:
        input_size: kv_lora_rank.
        output_size: heads * (qk_nope_head_dim + v_head_dim), over all TP ranks.
        config: transformer config with kv_emb_dim, gate, gate_norm, gate_norm_eps.
        tp_group: tensor-parallel group; the columns are split over it.
        up: class of the column-parallel up-projection (megatron-core's or Transformer Engine's).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        tp_group: ProcessGroup,
        up: type,
        name: str | None = None,
        **linear: Any,
    ) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        self.gate = GATES[config.gate]
        self.up = up(input_size, output_size, config=config, tp_group=tp_group, name=name, **linear)
        columns = output_size // tp_group.size()
        self.gate_proj_weight = self._parameter(columns, config.kv_emb_dim)
        torch.nn.init.normal_(self.gate_proj_weight, std=config.kv_emb_dim**-0.5)
        self.own = ["gate_proj_weight"]
        if config.gate_norm:
            self.gate_norm_weight, self.gate_norm_bias = self._parameter(columns), self._parameter(columns)
            torch.nn.init.ones_(self.gate_norm_weight)
            torch.nn.init.zeros_(self.gate_norm_bias)
            self.own += ["gate_norm_weight", "gate_norm_bias"]
        self.gate_input: GateInput | None = None
        self.before_gate: Callable[[], None] | None = None

    def _parameter(self, *shape: int) -> Parameter:
        device = torch.device("cpu") if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(self, latent: Tensor, heads: HeadsInput | None = None) -> Any:
        """Normed latent [S,B,kv_lora_rank] ([S/TP,...] under sequence parallelism) -> kv [S,B,N], None; with `heads`,
        which our kernels must be there for, queries, keys and values as `split_heads`."""
        if self.gate_input is None:
            raise RuntimeError("GatedKVUp.forward without a gate embedding: call it through EGMLATransformerLayer")
        up_SBN, _ = self.up(latent)
        if self.before_gate is not None:
            self.before_gate()
        # no all-reduce of the input gradient over TP: the exchange's adjoint, or the expert-data-parallel
        # sum of the table's gradient at W = 1, adds the ranks' parts
        gate_UN = linear(self.gate_input.rows_UD, self.gate_proj_weight, fused=self.config.fused_grad_accumulation)
        row_map = self.gate_input.row_map
        if self.config.triton_kernels and self.gate.kernel and row_map is not None:
            return self._fused(up_SBN, gate_UN, row_map, self.gate.kernel, heads)
        kv_SBN = self._norm(gate_by_row(up_SBN, gate_UN, row_map, self.gate))
        return (kv_SBN, None) if heads is None else heads.split(kv_SBN)

    def _fused(self, up_SBN: Tensor, gate_UN: Tensor, row_map: Tensor, gate: str, heads: HeadsInput | None) -> Any:
        weight, bias = (self.gate_norm_weight, self.gate_norm_bias) if self.config.gate_norm else (None, None)
        eps, group = self.config.gate_norm_eps, self.tp_group
        if heads is None:
            from egmla_megatron.attention.gate_heads_cuda import gate_norm

            kv_TN = gate_norm(up_SBN.flatten(0, 1), gate_UN, row_map, weight, bias, eps, gate, group)
            return kv_TN.view_as(up_SBN), None
        from egmla_megatron.attention.gate_heads_cuda import gate_heads

        return gate_heads(
            heads.q, up_SBN, gate_UN, heads.rope_SBR, weight, bias, row_map, heads.angles_SR, eps, gate, heads.heads,
            heads.sizes, group,
        )  # fmt: skip

    def _norm(self, x_SBN: Tensor) -> Tensor:
        if not self.config.gate_norm:
            return x_SBN
        eps = self.config.gate_norm_eps
        if self.tp_group.size() == 1:
            return F.layer_norm(x_SBN, x_SBN.shape[-1:], self.gate_norm_weight, self.gate_norm_bias, eps)
        return layer_norm_over_tp(x_SBN, self.gate_norm_weight, self.gate_norm_bias, eps, self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Own parameters split on axis 0 over TP, plus those of the up-projection under `up.`."""
        state = dict(self.up.sharded_state_dict(f"{prefix}up.", sharded_offsets, metadata))
        own = {name: getattr(self, name) for name in self.own}
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        state.update(make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups))
        return state

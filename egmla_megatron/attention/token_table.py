"""The gating tables of one pipeline stage, sharded by dimension over the gate group."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from egmla_megatron.attention.exchange import exchange_columns, gather_ids

__all__ = ["GateTable", "take_layer"]

# B batch, S sequence, L layers of the stage, D gate embedding width, C = D / W columns of this rank


class GateTable(MegatronModule):
    """All gating tables of a stage as one parameter [vocab, L, C], so that a token is one contiguous read.

    The parameter carries `allreduce=False`: megatron-core then keeps its gradient in the expert buffers,
    sums it over the expert-data-parallel group (the ranks holding the same columns) and leaves it out of
    the dense reduction. Memory per rank: vocab * L * D / W elements.

    Args:
        config: transformer config with `kv_emb_dim` (D) and `params_dtype`.
        vocab_size: rows.
        num_layers: L, layers of this stage.
        layer_offset: index of the stage's first layer in the model, for checkpoints.
        total_layers: layers of the model, for checkpoints.
        group: the gate group (W ranks).
        replicas: ranks that hold the same columns of the same layers.
    """

    def __init__(
        self,
        config: Any,
        *,
        vocab_size: int,
        num_layers: int,
        layer_offset: int,
        total_layers: int,
        group: ProcessGroup,
        replicas: ProcessGroup,
    ) -> None:
        super().__init__(config)
        self.group, self.replicas = group, replicas
        self.layer_offset, self.total_layers = layer_offset, total_layers
        columns = config.kv_emb_dim // group.size()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(vocab_size, num_layers, columns, dtype=config.params_dtype, device=device)
        )
        with torch.no_grad():
            self.weight.normal_(0.0, config.gate_table_init_std)
        self.weight.allreduce = False  # type: ignore[attr-defined]

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Token ids [B,S] -> gate embeddings of every layer [S,B,L,D] (sequence first, as megatron-core)."""
        ids_T = ids_BS.t().reshape(-1)
        batch, sequence = ids_BS.shape
        vocab, layers, columns = self.weight.shape
        flat = self.weight.view(vocab, layers * columns)
        if self.group.size() == 1:
            return F.embedding(ids_T, flat).view(sequence, batch, layers, columns)
        everyone_WT = gather_ids(ids_T, self.group)
        rows_WTLC = F.embedding(everyone_WT, flat).view(*everyone_WT.shape, layers, columns)
        return exchange_columns(rows_WTLC, self.group).view(sequence, batch, layers, columns * self.group.size())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """One global tensor [vocab, layers of the model, D], whatever the layout: checkpoints reshard freely."""
        vocab, layers, columns = self.weight.shape
        shape = (vocab, self.total_layers, columns * self.group.size())
        offset = (0, self.layer_offset, self.group.rank() * columns)
        fragments = (1, self.total_layers // layers, self.group.size())
        key = f"{prefix}weight"
        return {
            key: ShardedTensor(
                key=key,
                data=self.weight,
                dtype=self.weight.dtype,
                local_shape=tuple(self.weight.shape),
                global_shape=shape,
                global_offset=offset,
                axis_fragmentations=fragments,
                replica_id=(0, 0, self.replicas.rank()),
            )
        }


class _Tap(torch.autograd.Function):
    """stack -> (slice of one layer, stack). In backward one gradient of the stack flows down the layers and
    each adds its slice in place: 4x the stack's bytes in all, where `select` per layer writes 49x at 24 layers."""

    @staticmethod
    def forward(ctx: Any, stack_SBLD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.shape = layer, stack_SBLD.shape
        return stack_SBLD.select(-2, layer), stack_SBLD.view_as(stack_SBLD)

    @staticmethod
    def backward(ctx: Any, grad_SBD: Tensor | None, grad_SBLD: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_SBD is None:
            return grad_SBLD, None
        if grad_SBLD is None:
            grad_SBLD = torch.zeros(ctx.shape, dtype=grad_SBD.dtype, device=grad_SBD.device)
        grad_SBLD.select(-2, ctx.layer).add_(grad_SBD)
        return grad_SBLD, None


def take_layer(stack_SBLD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """The gate embedding of one layer [S,B,D], and the stack [S,B,L,D] to hand to the next layer.

    The next layer must take from the returned stack, never from the original: its gradient is one buffer.
    """
    return _Tap.apply(stack_SBLD, layer)

"""The gating tables of one pipeline stage, sharded by dimension over the gate group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from egmla_megatron.attention.exchange import EXCHANGES, select_rows
from egmla_megatron.attention.exchange_probe import waiting
from egmla_megatron.attention.gate_ids import GateIds
from egmla_megatron.attention.table_lookup import look_up

__all__ = ["GateTable", "take_layer"]

# U rows (distinct ids of a micro-batch), L layers of the stage, D gate embedding width, C = D / W columns of this rank


class GateTable(MegatronModule):
    """All gating tables of a stage as one parameter [vocab, L, C], so that a token is one contiguous read.

    The parameter carries `allreduce=False`: megatron-core then keeps its gradient in the expert buffers,
    sums it over the expert-data-parallel group (the ranks holding the same columns) and leaves it out of
    the dense reduction. Memory per rank: vocab * L * D / W elements.

    Args:
        config: transformer config with `kv_emb_dim` (D), `params_dtype`, `gate_exchange`, `gate_granularity`.
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
        exchanges = group.size() > 1 and torch.cuda.is_available()
        self.stream = torch.cuda.Stream(priority=-1) if exchanges else None  # before queued GEMMs
        # called with the ids of a look-up, whose rows may wait for updates (train/deferred_rows.py)
        self.before_look_up: Callable[[Tensor], None] | None = None

    def forward(self, ids: GateIds) -> Tensor:
        """Row numbers of a micro-batch -> gate embeddings of every layer of its own rows [U,L,D].

        With W > 1 on a GPU the exchange runs on `self.stream`, in backward too, so that it overlaps with the embedding
        and the first layer; who reads the result waits for that stream before (`wait`).
        """
        if self.before_look_up is not None:
            self.before_look_up(ids.lookup_R)
        rows_RLC = look_up(self.weight, ids.lookup_R, self._distinct_blocks(ids))
        if self.group.size() == 1:
            return rows_RLC
        if self.stream is None:
            return self._exchange(rows_RLC, ids.own_U, None)
        stream = torch.cuda.current_stream()
        self.stream.wait_stream(stream)
        with torch.cuda.stream(self.stream):
            rows_ULD = self._exchange(rows_RLC, ids.own_U, stream)
        # each was made on one stream and is read on the other: its memory must not be reused before
        rows_RLC.record_stream(self.stream)
        rows_ULD.record_stream(stream)
        if ids.own_U is not None:
            ids.own_U.record_stream(self.stream)
        return rows_ULD

    def _distinct_blocks(self, ids: GateIds) -> int:
        """Of `look_up`: an all-to-all looks up one member's distinct ids after the other's."""
        if ids.row_map is None:
            return 0
        return self.group.size() if ids.own_U is None and self.config.gate_exchange == "all_to_all" else 1

    def _exchange(self, rows_RLC: Tensor, own_U: Tensor | None, stream: torch.cuda.Stream | None) -> Tensor:
        exchange = EXCHANGES[self.config.gate_exchange]
        at_once = rows_RLC.shape[1] if self.config.gate_granularity == "fused" else 1
        parts = [exchange(part, self.group, stream) for part in rows_RLC.split(at_once, dim=1)]
        rows_RLD = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return rows_RLD if own_U is None else select_rows(rows_RLD, own_U)

    def wait(self) -> None:
        """Let the current stream wait for the rows of every forward so far."""
        if self.stream is not None:
            with waiting():
                torch.cuda.current_stream().wait_stream(self.stream)

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
    def forward(ctx: Any, stack_ULD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.shape = layer, stack_ULD.shape
        return stack_ULD.select(-2, layer), stack_ULD.view_as(stack_ULD)

    @staticmethod
    def backward(ctx: Any, grad_UD: Tensor | None, grad_ULD: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_UD is None:
            return grad_ULD, None
        if grad_ULD is None:
            grad_ULD = torch.zeros(ctx.shape, dtype=grad_UD.dtype, device=grad_UD.device)
        grad_ULD.select(-2, ctx.layer).add_(grad_UD)
        return grad_ULD, None


def take_layer(stack_ULD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """The gate embedding of one layer [U,D], and the stack [U,L,D] to hand to the next layer.

    The next layer must take from the returned stack, never from the original: its gradient is one buffer.
    """
    return _Tap.apply(stack_ULD, layer)

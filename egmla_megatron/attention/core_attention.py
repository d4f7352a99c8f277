"""Core attention on torch's scaled_dot_product_attention, with k and v heads of different width.

Under context parallelism every rank gathers the keys and values of the whole sequence for its own queries.

megatron-core's own DotProductAttention rejects `k_channels`, so MLA cannot be built from its local
modules. This one takes one named SDPA backend and fails when torch cannot run it: a silent fall to the
math path costs a factor of ten on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from egmla_megatron.config.check_attention import check_kernel
from egmla_megatron.errors import UserError

__all__ = ["BACKENDS", "TorchCoreAttention", "choose_backend", "whole_sequence"]

# S sequence (of this rank), B batch, N heads of this rank, K width of q and k heads, V width of v heads
# C tokens of a chunk (under context parallelism S = 2C), T keys up to a chunk's end
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def choose_backend(name: str, *, cuda: bool, precision: str, equal_heads: bool, dropout: bool = False) -> str:
    """Resolve `parallel.attention_backend` for the torch implementation.

    On Hopper cuDNN takes unequal heads (192/128) unpadded and is the fastest; fp32 on a GPU needs the
    memory-efficient kernels; a CPU has flash (equal heads, no dropout) and math.

    Raises:
        UserError: the named backend cannot run that.
    """
    if name == "auto":
        if cuda:
            return "cudnn" if precision == "bf16" else "efficient"
        return "flash" if equal_heads and not dropout else "math"
    check_kernel(name, cuda=cuda, precision=precision, equal=equal_heads, dropout=dropout)
    return name


class TorchCoreAttention(nn.Module):
    """softmax(q k^T * scale) v, causal, for the `core_attention` slot of an attention spec.

    Args:
        config: its `sdpa_backend` names the SDPA kernel (a key of `BACKENDS`).
        softmax_scale: factor of the scores; None: 1/sqrt(K).
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal:
            raise UserError(f"core attention: got mask type {attn_mask_type}, only causal is implemented")
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.backend = BACKENDS[config.sdpa_backend]
        self.context: ProcessGroup | None = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.context = pg_collection.cp
        self.forked = not config.sequence_parallel  # with it, megatron-core runs the whole layer inside the fork

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        """q [S,B,N,K], k [S,B,N,K], v [S,B,N,V] -> [S,B,N*V].

        Under context parallelism S are chunks `rank` and `2 ranks - 1 - rank` of the sequence (see
        data.context_shard), and so is the output.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise NotImplementedError("packed sequences and attention biases are not supported by TorchCoreAttention")
        dropout = self.dropout if self.training else 0.0
        # tensor-parallel ranks hold different heads, which need different masks
        fork = get_cuda_rng_tracker().fork() if dropout and self.forked else nullcontext()
        if self.context is not None:
            key, value = whole_sequence(key, self.context), whole_sequence(value, self.context)
        with fork, sdpa_kernel(self.backend):
            if self.context is None:
                return self._attend(query, key, value, dropout)
            early, late = query.chunk(2)
            rank, last = self.context.rank(), 2 * self.context.size() - 1
            outs = [
                self._attend(chunk, key[: end * chunk.shape[0]], value[: end * chunk.shape[0]], dropout)
                for chunk, end in ((early, rank + 1), (late, last - rank + 1))
            ]
            return torch.cat(outs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Queries [C,B,N,K] that are the last C of the T keys [T,B,N,K], values [T,B,N,V] -> [C,B,N*V]."""
        q_BNCK, k_BNTK, v_BNTV = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        square = query.shape[0] == key.shape[0]
        mask = None if square else _last_rows_mask(query, key.shape[0], self.backend)
        out_BNCV = F.scaled_dot_product_attention(
            q_BNCK, k_BNTK, v_BNTV, attn_mask=mask, dropout_p=dropout, is_causal=square, scale=self.scale
        )
        return out_BNCV.permute(2, 0, 1, 3).flatten(2)


def whole_sequence(x_SBNK: Tensor, group: ProcessGroup) -> Tensor:
    """The context-parallel ranks' chunks of keys or values in the sequence's order: [S,B,N,K] -> [S*ranks,B,N,K].

    In backward the ranks' gradients are summed and every rank gets that of its own chunks.
    """
    gathered = gather_from_sequence_parallel_region(x_SBNK, tensor_parallel_output_grad=True, group=group)
    pairs = gathered.unflatten(0, (group.size(), 2, -1))
    return torch.cat([pairs[:, 0], pairs[:, 1].flip(0)]).flatten(0, 1)


def _last_rows_mask(query: Tensor, keys: int, backend: SDPBackend) -> Tensor:
    """The last rows [C,T] of a causal mask over T keys, in the form in which the backend stays fused.

    The GPU's flash kernel takes no mask and the efficient one needs none: `causal_lower_right` has their own flag set.
    cuDNN has no such flag behind SDPA; its kernel adds a bias, as do the kernels of a CPU.
    """
    if query.is_cuda and backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        return causal_lower_right(query.shape[0], keys)
    return _causal_bias(query.shape[0], keys, query.dtype, query.device)


@lru_cache(maxsize=2)  # one for each of a rank's chunks, shared by all layers: autograd keeps it until backward
def _causal_bias(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    allowed = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
    return torch.zeros(rows, keys, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))

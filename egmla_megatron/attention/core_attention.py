"""Core attention on torch's scaled_dot_product_attention, with k and v heads of different width.

megatron-core's own DotProductAttention rejects `k_channels`, so MLA cannot be built from its local
modules. This one takes one named SDPA backend and fails when torch cannot run it: a silent fall to the
math path costs a factor of ten on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from egmla_megatron.errors import UserError

__all__ = ["BACKENDS", "TorchCoreAttention", "choose_backend"]

# S sequence, B batch, N heads of this rank, K width of q and k heads, V width of v heads
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
        UserError: the named backend does not exist for the torch implementation.
    """
    if name == "auto":
        if cuda:
            return "cudnn" if precision == "bf16" else "efficient"
        return "flash" if equal_heads and not dropout else "math"
    if name not in BACKENDS:
        raise UserError(
            f"parallel.attention_backend: got {name!r} with the torch implementation, allowed auto, "
            f"{', '.join(BACKENDS)}; set parallel.implementation=te for te_fused"
        )
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
        """q [S,B,N,K], k [S,B,N,K], v [S,B,N,V] -> [S,B,N*V]."""
        if packed_seq_params is not None or attention_bias is not None:
            raise NotImplementedError("packed sequences and attention biases are not supported by TorchCoreAttention")
        q_BNSK, k_BNSK, v_BNSV = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # tensor-parallel ranks hold different heads, which need different masks
        fork = get_cuda_rng_tracker().fork() if dropout and self.forked else nullcontext()
        with fork, sdpa_kernel(self.backend):
            out_BNSV = F.scaled_dot_product_attention(
                q_BNSK, k_BNSK, v_BNSV, dropout_p=dropout, is_causal=True, scale=self.scale
            )
        return out_BNSV.permute(2, 0, 1, 3).flatten(2)

"""RMSNorm and LayerNorm for layers without Transformer Engine.

megatron-core's WrappedTorchNorm refuses sequence parallelism. These mark their parameters
`sequence_parallel`, which makes megatron-core sum their gradients over the tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LatentNorm", "TorchLayerNorm", "TorchRMSNorm"]


class TorchRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` with the constructor megatron-core calls. x [..., hidden_size] -> same shape."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentNorm(TorchRMSNorm):
    """RMSNorm of MLA's latent by our kernel where it comes with the RoPE key, else as `nn.RMSNorm`."""

    def forward(self, x: Tensor) -> Any:
        """[...,L] -> [...,L]; [...,L+R] -> (normed [...,L], the rest as it was [...,R])."""
        if x.shape[-1] == self.weight.shape[0]:
            return super().forward(x)
        from egmla_megatron.attention.latent_norm_cuda import latent_norm

        assert self.eps is not None
        return latent_norm(x, self.weight, self.eps)


class TorchLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` with the constructor megatron-core calls. x [..., hidden_size] -> same shape."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

"""RMSNorm and LayerNorm for layers without Transformer Engine.

megatron-core's WrappedTorchNorm refuses sequence parallelism. These mark their parameters
`sequence_parallel`, which makes megatron-core sum their gradients over the tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["TorchLayerNorm", "TorchRMSNorm"]


class TorchRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` with the constructor megatron-core calls. x [..., hidden_size] -> same shape."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TorchLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` with the constructor megatron-core calls. x [..., hidden_size] -> same shape."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

"""The part of a sequence that one context-parallel rank holds."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["context_shard"]


def context_shard(x_BS: Tensor, rank: int, size: int) -> Tensor:
    """[B,S] -> [B,S/size]: chunks `rank` and `2 size - 1 - rank` of 2 size equal chunks along the sequence.

    The pairing that megatron-core and Transformer Engine use: under causal attention every rank then has the same work.
    """
    if size == 1:
        return x_BS
    chunks = x_BS.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)

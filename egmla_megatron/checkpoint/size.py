"""How large a checkpoint will be, without torch."""

from __future__ import annotations

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.count import count_parameters

__all__ = ["checkpoint_bytes"]


def checkpoint_bytes(cfg: RunConfig) -> int:
    """Bytes of one checkpoint: weights, fp32 master weights and two fp32 moments, plus metadata."""
    weight = cfg.train.element_bytes
    master = 0 if weight == 4 and not cfg.optimizer.distributed else 4
    return int(count_parameters(cfg.model).total * (weight + master + 8) * 1.02) + 2**20

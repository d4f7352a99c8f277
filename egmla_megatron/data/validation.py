"""How much validation data an evaluation takes."""

from __future__ import annotations

from egmla_megatron.config.check import Layout, micro_batch_unit
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = ["validation_samples"]


def validation_samples(cfg: RunConfig, layout: Layout, available: int) -> int:
    """Samples of one evaluation over all ranks: whole micro-batches for every rank, and as many as its schedule needs.

    Raises:
        UserError: less validation data than that.
    """
    at_once = cfg.train.micro_batch_size * layout.dp * micro_batch_unit(cfg)
    samples = min(cfg.train.eval_batches * cfg.train.global_batch_size, available) // at_once * at_once
    if samples == 0:
        raise UserError(
            f"data.valid: got {available} samples of {cfg.train.seq_length} tokens, allowed at least {at_once} "
            "(micro_batch_size x data-parallel ranks, and x stages of an interleaved pipeline); "
            "use more validation text, or none (data.valid=[])"
        )
    return samples

"""Options for samples that hold several documents: what megatron-core offers and what these models can honour."""

from __future__ import annotations

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = ["check_document_options"]


def check_document_options(cfg: RunConfig) -> None:
    """Refuses what the model would ignore without a word.

    Raises:
        UserError: names the option and the reason.
    """
    if cfg.data.reset_attention_mask:
        raise UserError(
            "data.reset_attention_mask: got true, allowed false (the attention kernels here, SDPA and Transformer "
            "Engine's, are causal over the whole sequence and would ignore the mask); set it to false. Documents are "
            "told apart by the end-of-document id between them"
        )
    if cfg.data.reset_position_ids and cfg.model.attention != "mha":
        raise UserError(
            "data.reset_position_ids: got true with model.attention=mla, allowed false (rotary embeddings count from "
            "the start of the sequence and would ignore the positions; attention depends on distances only); set it to "
            "false, or use model.attention=mha, which learns its positions"
        )

"""Memory that communication holds at the peak of a step, beside the tensors that it moves.

Most of it needs none there: gradients are summed and weights gathered in place, in the buffers of megatron-core's DDP
(padding aside), and the exchange of gate rows works at both ends of a micro-batch, where its activations are not there.
NCCL's own buffers are not torch's.
"""

from __future__ import annotations

from dataclasses import dataclass

from egmla_megatron.config.check import Layout
from egmla_megatron.config.schema import ModelConfig, RunConfig

__all__ = ["Buffers", "communication_buffers", "key_and_value_elements"]

_RING = 4  # keys and values and their gradients, sent and received: Transformer Engine's ring in backward


@dataclass(frozen=True)
class Buffers:
    """Bytes on one rank."""

    kept: int  # between forward and backward, of all micro-batches in flight
    in_layer: int  # besides, during the backward of one layer


def communication_buffers(cfg: RunConfig, layout: Layout, stage: int, in_flight: int, *, te: bool) -> Buffers:
    """Of a rank of one pipeline stage.

    Args:
        in_flight: micro-batches between their forward and backward.
        te: layers by Transformer Engine, else by torch.
    """
    model, last = cfg.model, stage == layout.pp - 1
    wide = cfg.train.element_bytes
    tokens = cfg.train.micro_batch_size * cfg.train.seq_length // layout.cp
    sequence = layout.tp > 1 and cfg.parallel.sequence
    kept, in_layer = 0, 0
    if sequence and (last or not te):
        kept += tokens * model.hidden_size  # megatron-core's one buffer for the inputs of its GEMMs, the head's too
    if layout.pp > 1:
        handed_on = tokens * model.hidden_size // (layout.tp if sequence else 1)
        kept += handed_on * in_flight * (layout.vp - last)  # deallocate_pipeline_outputs is off
        kept += 2 * handed_on * (layout.vp > 1)  # received ahead of time, in both directions
    if layout.cp > 1:
        per_layer = tokens * model.num_attention_heads // layout.tp * key_and_value_elements(cfg.model)
        again = cfg.train.recompute == "full" or (cfg.train.recompute == "selective" and model.attention == "mha")
        if te:
            in_layer += _RING * per_layer
        elif again:
            in_layer += (layout.cp - 1) * per_layer
        else:  # attention keeps those of the whole sequence
            kept += (layout.cp - 1) * per_layer * layout.layers_per_stage * in_flight
    return Buffers(wide * kept, wide * in_layer)


def key_and_value_elements(model: ModelConfig) -> int:
    """Of a token and head, as attention takes them."""
    key = model.v_head_dim if model.attention == "mha" else model.qk_nope_head_dim + model.qk_rope_head_dim
    return key + model.v_head_dim

"""MLA self-attention with a gate embedding, and the transformer layer that hands it over.

Both are subclasses for a layer spec: no method of megatron-core is copied or rebound.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor

from egmla_megatron.attention.gated_kv_up import GatedKVUp, GateInput, HeadsInput
from egmla_megatron.attention.head_sizes import HeadSizes
from egmla_megatron.attention.main_gradient import has_main_gradient, linear_beside
from egmla_megatron.attention.norms import LatentNorm
from egmla_megatron.attention.token_table import take_layer

__all__ = ["EGMLASelfAttention", "EGMLATransformerLayer", "MLATransformerLayer"]

# S sequence, B batch, U rows (distinct ids of the micro-batch), L layers of the stage, D gate embedding width


class EGMLASelfAttention(MLASelfAttention):
    """MLA self-attention for all variants; gated when its `linear_kv_up_proj` is a GatedKVUp.

    It also mends two faults of megatron-core 0.19.2 that concern plain MLA as well (see the methods).
    """

    gate_input: GateInput | None = None
    recompute_up_proj: bool

    @property
    def head_sizes(self) -> HeadSizes:
        """Elements per head."""
        return HeadSizes(self.config.qk_head_dim, self.config.qk_pos_emb_head_dim, self.config.v_head_dim)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The spec's own modules. megatron-core would invent a q norm when q_lora_rank is None, and
        `qk_layernorm=True` doubles the q norm's gradient under TP without sequence parallelism."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Down-projections whose RoPE part is summed over TP in backward.

        Each TP rank's heads send their own gradient into the shared RoPE key. megatron-core gathers it with
        a backward that only splits, so the sum over ranks is lost (RoPE rows of linear_kv_down_proj).
        """
        config, group = self.config, self.tp_group
        if group.size() == 1 and self._one_gradient():
            return linear_beside(hidden_states, self.linear_kv_down_proj.weight)
        q, kv = super()._qkv_down_projection(hidden_states)
        if group.size() == 1:
            return q, kv
        if kv.size(-1) != config.kv_lora_rank + config.qk_pos_emb_head_dim:
            kv = gather_from_tensor_model_parallel_region(kv, group)
        elif config.sequence_parallel:
            return q, kv  # duplicated linear on sequence shards: megatron-core's own gather reduces
        if config.sequence_parallel:  # sends megatron-core into its branch with the reducing gather
            return q, scatter_to_sequence_parallel_region(kv, group)
        latent, rope = kv.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        return q, torch.cat([latent, copy_to_tensor_model_parallel_region(rope, group)], dim=-1)

    def _one_gradient(self) -> bool:
        """Whether queries and latents are made of the same tensor, by layers that add weight gradients themselves: then
        the down-projection adds its input's gradient to that of the queries."""
        config = self.config
        fused = config.fused_grad_accumulation and config.fp8 is None and config.q_lora_rank is None
        return fused and has_main_gradient(self.linear_kv_down_proj.weight)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the parent's, with the gate's input in place for the length of the call.

        Recomputed up-projections take it as explicit arguments of the checkpointed function:
        read from the module it would be the wrong micro-batch's when backward runs.
        """
        if self.gate_input is None:
            return self._plain(hidden_states, *args, **kwargs)
        if not self.recompute_up_proj:
            return self._gated(self.gate_input, hidden_states, *args, **kwargs)

        def qkv(hidden: Tensor, rows_UD: Tensor, row_map: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            self.recompute_up_proj = False  # the parent must not checkpoint once more inside
            try:
                return self._gated(GateInput(rows_UD, row_map), hidden, *args, **kwargs)[:3]
            finally:
                self.recompute_up_proj = True

        self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=None)
        query, key, value = self.qkv_up_checkpoint.checkpoint(qkv, hidden_states, *self.gate_input)
        return query, key, value, None, None

    def _gated(self, gate_input: GateInput, *args: Any, **kwargs: Any) -> Any:
        self.linear_kv_up_proj.gate_input = gate_input
        try:
            return self._plain(*args, **kwargs)
        finally:
            self.linear_kv_up_proj.gate_input = None

    def _plain(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """megatron-core's way, or the same for training alone with its last operations in one kernel."""
        if not self.config.triton_kernels or self.recompute_up_proj:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        q, down = self._qkv_down_projection(hidden_states)
        if not isinstance(self.kv_layernorm, LatentNorm):
            raise RuntimeError(f"kv_layernorm: got {type(self.kv_layernorm)}, allowed LatentNorm with triton_kernels")
        latent, rope_SBR = self.kv_layernorm(down)
        if self.config.sequence_parallel and self.tp_group.size() > 1:
            rope_SBR = gather_from_sequence_parallel_region(rope_SBR, group=self.tp_group)
        if self.config.q_lora_rank is None:
            q, _ = self.linear_q_proj(q)
        else:
            q, _ = self.linear_q_up_proj(self.q_layernorm(q))
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, self.config, None)
        angles_SR = self.rotary_pos_emb(length)[: q.shape[0], 0, 0]
        heads = HeadsInput(q, rope_SBR, angles_SR, self.num_attention_heads_per_partition, self.head_sizes)
        if isinstance(self.linear_kv_up_proj, GatedKVUp):
            return *self.linear_kv_up_proj(latent, heads), None, None
        kv, _ = self.linear_kv_up_proj(latent)
        return *heads.split(kv), None, None


class MLATransformerLayer(TransformerLayer):
    """megatron-core's layer. With `config.fused_grad_accumulation` its linear layers, Transformer Engine's and our own,
    add weight gradients to `main_grad`; megatron-core's own switch would ask apex for the same in the output layer."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.fused_grad_accumulation:
            config = copy.copy(config)
            config.gradient_accumulation_fusion = True
        super().__init__(config, *args, **kwargs)


class EGMLATransformerLayer(MLATransformerLayer):
    """A transformer layer that takes its gate embedding from `context` and passes the rest on.

    `context` (with `context_mask`, which row of it a token uses) is an explicit argument of every layer and of
    megatron-core's checkpointed forward, so recomputation and pipelining see the right micro-batch by construction.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        offset = get_transformer_layer_offset(self.config, kwargs.get("vp_stage"), self.pg_collection.pp.rank())
        self.index_in_stage = self.layer_number - 1 - offset

    def forward(
        self, *args: Any, context: Tensor | None = None, context_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden states [S,B,H], context and context_mask -> hidden states and context, for the next layer.

        context: gate embeddings of the stage's layers [U,L,D] for U rows. context_mask: which row each token uses
        (`pack_row_map` of the S * B tokens in sequence-first order), None: row t belongs to token t.
        """
        if context is None:
            raise RuntimeError("EGMLATransformerLayer needs context=gate embeddings: call it through EGMLAModel")
        rows_UD, context = take_layer(context, self.index_in_stage)
        self.self_attention.gate_input = GateInput(rows_UD, context_mask)
        try:
            hidden, _ = super().forward(*args, context=None, **kwargs)
        finally:
            self.self_attention.gate_input = None
        return hidden, context

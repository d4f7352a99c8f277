"""The model of the tests on GPUs: as small as fused kernels allow."""

from __future__ import annotations

from egmla_megatron.config.schema import ModelConfig

__all__ = ["SMALL"]

SMALL = ModelConfig(
    num_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    intermediate_size=640,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kv_lora_rank=64,
    kv_emb_dim=128,
    vocab_size=512,
    max_position_embeddings=512,
)

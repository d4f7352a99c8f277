"""The oracle's baselines against independent implementations: GPT-2 and DeepSeek-V3 of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from egmla_megatron.attention.reference import MHA_NORM_EPS, ReferenceModel
from egmla_megatron.config.schema import ModelConfig

MLA = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    intermediate_size=20,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=6,
    kv_lora_rank=9,
    kv_emb_dim=0,
    gate="none",
    vocab_size=61,
    max_position_embeddings=32,
    init_std=0.2,
)
IDS = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(0))


def randomized(model: ModelConfig) -> ReferenceModel:
    """The oracle with norms and biases that are no identities."""
    torch.manual_seed(0)
    reference = ReferenceModel(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return reference


@pytest.mark.parametrize("q_lora_rank", [0, 7])
def test_plain_mla_is_dense_deepseek_v3(q_lora_rank: int) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = replace(MLA, q_lora_rank=q_lora_rank)
    reference = randomized(model)
    config: Any = DeepseekV3Config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_attention_heads,
        q_lora_rank=q_lora_rank or None,
        kv_lora_rank=model.kv_lora_rank,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        first_k_dense_replace=model.num_layers,
        rms_norm_eps=model.rms_norm_eps,
        tie_word_embeddings=True,
    )
    peer = DeepseekV3ForCausalLM(config).eval()
    missing, unexpected = peer.load_state_dict(reference.state_dict(), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    torch.testing.assert_close(peer(IDS).logits, reference(IDS), rtol=1e-5, atol=2e-5)


def test_mha_is_gpt2_with_exact_gelu() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = replace(MLA, attention="mha")
    reference = randomized(model)
    ours = reference.state_dict()
    names = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "mlp.up_proj": "mlp.c_fc"}
    names |= {"self_attn.o_proj": "attn.c_proj", "mlp.down_proj": "mlp.c_proj"}
    theirs = {
        "transformer.wte.weight": ours["model.embed_tokens.weight"],
        "transformer.wpe.weight": ours["model.embed_positions.weight"],
    }
    for kind in ("weight", "bias"):
        theirs[f"transformer.ln_f.{kind}"] = ours[f"model.norm.{kind}"]
        for layer in range(model.num_layers):
            prefix, peer_prefix = f"model.layers.{layer}.", f"transformer.h.{layer}."
            for name, peer_name in names.items():
                tensor = ours[f"{prefix}{name}.{kind}"]
                theirs[f"{peer_prefix}{peer_name}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
            qkv = torch.cat([ours[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"])
            theirs[f"{peer_prefix}attn.c_attn.{kind}"] = qkv.T if qkv.dim() == 2 else qkv
    config: Any = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.max_position_embeddings,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_attention_heads,
        n_inner=model.intermediate_size,
        activation_function="gelu",
        layer_norm_epsilon=MHA_NORM_EPS,
    )
    peer = GPT2LMHeadModel(config).eval()
    missing, unexpected = peer.load_state_dict(theirs, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    torch.testing.assert_close(peer(IDS).logits, reference(IDS), rtol=1e-5, atol=2e-5)

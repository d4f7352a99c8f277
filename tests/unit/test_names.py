"""The Megatron <-> Hugging Face table: complete for every switch, bit-exact both ways, loud when something is off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.names import from_hf_tensors, to_hf_tensors
from egmla_megatron.errors import UserError
from tests.tiny import gate_variants

TINY = ModelConfig(
    num_layers=2,
    hidden_size=12,
    num_attention_heads=3,
    intermediate_size=10,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=3,
    kv_lora_rank=7,
    kv_emb_dim=6,
    vocab_size=11,
    max_position_embeddings=8,
)
VARIANTS = {
    **gate_variants(TINY),
    "q_lora_untied": replace(TINY, q_lora_rank=5, tie_word_embeddings=False),
    "mla": replace(TINY, gate="none", kv_emb_dim=0),
    "mha": replace(TINY, attention="mha", gate="none", kv_emb_dim=0),
}


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS.keys())
def test_round_trip_covers_every_tensor_bit_exactly(model: ModelConfig) -> None:
    torch.manual_seed(0)
    expected = {name: torch.randn_like(tensor) for name, tensor in ReferenceModel(model).state_dict().items()}
    mcore = dict(from_hf_tensors(expected, model))
    back = dict(to_hf_tensors(mcore, model))
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)


def test_megatron_layouts() -> None:
    mha = VARIANTS["mha"]
    hf = dict(ReferenceModel(mha).state_dict())
    mcore = dict(from_hf_tensors(hf, mha))
    qkv = mcore["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert torch.equal(qkv[12:15], hf["model.layers.1.self_attn.k_proj.weight"][3:6])  # head 1: q at 9, k at 12
    gated = dict(ReferenceModel(TINY).state_dict())
    mcore = dict(from_hf_tensors(gated, TINY))
    assert mcore["gate_table.weight"].shape == (11, 2, 6)
    assert torch.equal(mcore["gate_table.weight"][:, 1], gated["model.layers.1.self_attn.gate_embed.weight"])
    fc1 = mcore["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(fc1[:10], gated["model.layers.0.mlp.gate_proj.weight"])


def test_missing_and_unmapped_tensors_are_named() -> None:
    mcore = dict(from_hf_tensors(dict(ReferenceModel(TINY).state_dict()), TINY))
    norm = "decoder.layers.1.self_attention.linear_kv_up_proj.gate_norm_bias"
    del mcore[norm]
    mcore["decoder.layers.0.mystery"] = torch.zeros(1)
    with pytest.raises(UserError, match=r"gate_norm_bias.*decoder\.layers\.0\.mystery"):
        dict(to_hf_tensors(mcore, TINY))


def test_long_lists_are_cut_and_counted() -> None:
    hf = {name: tensor for name, tensor in ReferenceModel(TINY).state_dict().items() if ".mlp." not in name}
    with pytest.raises(UserError, match=r"6 missing .* and 2 more"):
        dict(from_hf_tensors(hf, TINY))


def test_gate_table_with_the_wrong_number_of_layers() -> None:
    mcore = dict(from_hf_tensors(dict(ReferenceModel(TINY).state_dict()), TINY))
    mcore["gate_table.weight"] = torch.zeros(11, 3, 6)
    with pytest.raises(UserError, match=r"gate_table.weight: got 3 parts.*allowed 2"):
        dict(to_hf_tensors(mcore, TINY))

"""Tiny Hugging Face models with the weights of their oracles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.hf.configuration_egmla import EgmlaConfig
from egmla_megatron.convert.hf.modeling_egmla import EgmlaForCausalLM
from egmla_megatron.convert.hf_config import egmla_config, hf_config
from tests.tiny import gate_variants

BASE = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    intermediate_size=20,
    qk_nope_head_dim=7,
    qk_rope_head_dim=4,
    v_head_dim=5,
    kv_lora_rank=9,
    kv_emb_dim=6,
    vocab_size=61,
    init_std=0.2,
)
VARIANTS = {
    **gate_variants(BASE),
    "mla": replace(BASE, gate="none", kv_emb_dim=0),
    "q_lora_untied": replace(BASE, q_lora_rank=5, tie_word_embeddings=False),
    "even": replace(BASE, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=8, kv_emb_dim=8, num_attention_heads=2),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are fastest on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(model: ModelConfig, attention: str = "sdpa") -> tuple[ReferenceModel, Any]:
    """The oracle and a Hugging Face model with the same random weights (norms included)."""
    torch.manual_seed(1)
    reference = ReferenceModel(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    config = EgmlaConfig(**hf_config(egmla_config(model), dtype="float32", token_ids={"pad_token_id": 0}))
    config._attn_implementation = attention
    exported = EgmlaForCausalLM(config)
    missing, unexpected = exported.load_state_dict(reference.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    exported.tie_weights()
    return reference, exported.eval()


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(1, BASE.vocab_size, (batch, length), generator=torch.Generator().manual_seed(3))


def generate(exported: Any, ids: Tensor, **options: Any) -> Tensor:
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **options}
    return exported.generate(ids, **settings)

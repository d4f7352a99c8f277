"""Every place that knows the gates by name knows the same ones, and refuses any other by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from egmla_megatron.attention.gated_kv_up import GATES, gate_by_row
from egmla_megatron.attention.reference import ReferenceAttention
from egmla_megatron.attention.sum_by_row import pack_row_map
from egmla_megatron.convert.hf import attention_egmla, configuration_egmla
from egmla_megatron.convert.hf.configuration_egmla import EgmlaConfig
from egmla_megatron.convert.hf.layers_egmla import EgmlaAttention
from egmla_megatron.convert.hf_config import egmla_config, hf_config
from egmla_megatron.errors import UserError
from egmla_megatron.model.init import weight_std
from tests import tiny

PROJECTION = "decoder.layers.0.self_attention.linear_kv_up_proj.gate_proj_weight"
UNKNOWN: dict[str, Any] = {"gate": "max"}


def test_the_same_gates_everywhere() -> None:
    """`tiny.GATES` are those of the configuration, over which the tests are parametrized."""
    assert set(tiny.GATES) == GATES.keys() == attention_egmla.GATES.keys()
    assert set(configuration_egmla.GATES) == {*GATES, "none"}


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_is_known_and_the_same_function(gate: Any) -> None:
    torch.manual_seed(0)
    model = tiny.tiny_model(gate=gate, gate_norm=False)
    assert weight_std(PROJECTION, model) is not None
    reference = ReferenceAttention(model)
    exported: Any = EgmlaAttention(EgmlaConfig(**hf_config(egmla_config(model), dtype="float32", token_ids={})), 0)
    exported.load_state_dict(reference.state_dict())
    latent_BSC, ids_BS = torch.randn(2, 5, model.kv_lora_rank), torch.randint(model.vocab_size, (2, 5))
    normed_BSC = reference.kv_a_layernorm(latent_BSC)
    gated = GATES[gate].combine
    expected = gated(reference.kv_b_proj(normed_BSC), reference.gate_proj(reference.gate_embed(ids_BS)))
    assert torch.equal(reference.gated_kv(latent_BSC, ids_BS), expected)
    key, value = exported.expand(normed_BSC, torch.zeros(2, 5, model.qk_rope_head_dim), ids_BS)
    key = key[..., : model.qk_nope_head_dim]
    torch.testing.assert_close(torch.cat((key, value), dim=-1).transpose(1, 2).flatten(-2), expected)


@pytest.mark.parametrize("gate", GATES)
def test_gradients_of_gates_by_row(gate: str) -> None:
    """Against finite differences in float64; rows that several tokens use, one that none uses (padding)."""
    torch.manual_seed(0)
    up_SBN, gate_UN = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 5), (4, 5)))
    index_T = torch.tensor([0, 2, 2, 0, 2, 1])
    row_map = pack_row_map(index_T, 4)
    by_row = gate_by_row(up_SBN, gate_UN, row_map, GATES[gate])
    assert torch.equal(by_row, gate_by_row(up_SBN, gate_UN[index_T], None, GATES[gate]))
    assert torch.autograd.gradcheck(lambda up, rows: gate_by_row(up, rows, row_map, GATES[gate]), (up_SBN, gate_UN))


def test_an_unknown_gate_is_refused_by_name() -> None:
    model = replace(tiny.TINY, **UNKNOWN)
    with pytest.raises(UserError, match=r"model\.gate: got 'max', allowed mul, add, none"):
        ReferenceAttention(model)
    attention = ReferenceAttention(tiny.TINY)
    attention.model = model
    with pytest.raises(UserError, match=r"model\.gate: got 'max', allowed mul, add"):
        attention.gated_kv(torch.zeros(1, 1, model.kv_lora_rank), torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(UserError, match=r"model\.gate: got 'max', allowed mul, add"):
        weight_std(PROJECTION, model)
    with pytest.raises(ValueError, match="gate: got 'max', allowed mul, add, none"):
        EgmlaConfig(**UNKNOWN)
    config: Any = SimpleNamespace(**{**vars(EgmlaConfig()), **UNKNOWN}, qk_head_dim=128)
    with pytest.raises(ValueError, match="gate: got 'max', allowed none, mul, add"):
        EgmlaAttention(config, 0)

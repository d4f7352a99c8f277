"""EG-MLA-A: finished gates give what computed gates give, cost what is said, and end training and saving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from egmla_megatron.config.schema import ModelConfig
from tests.hf_models import BASE, VARIANTS, build, generate, ids_of, one_thread

__all__ = ["one_thread"]  # a fixture, used by every test of the file


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("model", [each for each in VARIANTS.values() if each.gated])
def test_outputs_stay_and_the_cost_is_said(model: ModelConfig, on_host: bool) -> None:
    _, exported = build(model)
    ids = ids_of(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    logits, text = exported(ids, attention_mask=mask).logits, generate(exported, ids, attention_mask=mask)
    beams = generate(exported, ids, num_beams=3)
    parameters = sum(parameter.numel() for parameter in exported.parameters())
    size = exported.precompute_gates(on_host=on_host)
    assert size == exported.config.precomputed_gate_elements * 4
    kv_dim = model.num_attention_heads * (model.qk_nope_head_dim + model.v_head_dim)
    assert size == model.num_layers * model.vocab_size * kv_dim * 4
    gone = model.num_layers * model.kv_emb_dim * (model.vocab_size + kv_dim)  # table and projection of every layer
    assert sum(parameter.numel() for parameter in exported.parameters()) == parameters - gone
    torch.testing.assert_close(exported(ids, attention_mask=mask).logits, logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(generate(exported, ids, attention_mask=mask), text)
    assert torch.equal(generate(exported, ids, num_beams=3), beams)
    buffers = [name for name, _ in exported.named_buffers() if "table" in name]
    assert bool(buffers) is not on_host  # host tables must not move with the model


def test_the_paper_model_costs_what_the_documentation_says() -> None:
    from egmla_megatron.convert.hf.configuration_egmla import EgmlaConfig

    base = EgmlaConfig()
    large = EgmlaConfig(
        num_hidden_layers=24, num_attention_heads=16, qk_nope_head_dim=128, v_head_dim=128, kv_emb_dim=512
    )
    gigabytes = [config.precomputed_gate_elements * 2 / 1e9 for config in (base, large)]
    assert [round(size, 1) for size in gigabytes] == [1.9, 9.9]


def test_what_cannot_be_done_afterwards(tmp_path: Path) -> None:
    _, exported = build(BASE)
    exported.train()
    with pytest.raises(ValueError, match="training mode"):
        exported.precompute_gates()
    exported.eval().precompute_gates()
    for action, message in (
        (exported.precompute_gates, "called before"),
        (lambda: exported.save_pretrained(tmp_path), "cannot be saved"),
        (lambda: exported.train()(ids_of(1, 2)), "cannot be trained"),
    ):
        with pytest.raises(ValueError, match=message):
            action()
    plain: Any = build(replace(BASE, gate="none", kv_emb_dim=0))[1]
    with pytest.raises(ValueError, match="has no gates"):
        plain.precompute_gates()

"""Counts against the paper's table of models and against sums written out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from egmla_megatron.config.check_model import check_model
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.model.count import count_parameters, flops_per_token, kv_cache_elements_per_token

# name: active, tables, total in millions; cached elements per token
_TABLE = {
    "mla_base_kv256": (120.6, 0.0, 120.6, 3840),
    "mla_large_kv512": (645.7, 0.0, 645.7, 6912),
    "mla_xlarge_kv512": (1188.4, 0.0, 1188.4, 13824),
    "eg_mla_base_kv256": (125.4, 154.5, 279.9, 3840),
    "eg_mla_base_kv128": (121.9, 154.5, 276.4, 2304),
    "eg_mla_base_kv64": (120.1, 154.5, 274.6, 1536),
    "eg_mla_base_kv16": (118.8, 154.5, 273.3, 960),
    "eg_mla_base_emb64": (116.5, 38.6, 155.2, 1536),
    "eg_mla_base_emb128": (117.7, 77.3, 195.0, 1536),
    "eg_mla_base_emb512": (124.8, 309.1, 433.9, 1536),
    "eg_mla_base_emb1024": (134.2, 618.1, 752.4, 1536),
    "eg_mla_base_emb2048": (153.1, 1236.3, 1389.4, 1536),
    "eg_mla_large_kv128_emb512": (642.7, 309.1, 951.7, 2304),
    "eg_mla_large_kv256_emb512": (652.1, 309.1, 961.2, 3840),
    "eg_mla_xlarge_kv128_emb512": (1182.3, 618.1, 1800.4, 4608),
    "mha_base": (124.5, 0.0, 124.5, 18432),
}


@pytest.mark.parametrize("name", _TABLE)
def test_row_of_the_table(name: str) -> None:
    model = load_config(name).model
    check_model(model)
    count = count_parameters(model)
    millions = [round(value / 1e6, 1) for value in (count.active, count.gate_tables, count.total)]
    assert (*millions, kv_cache_elements_per_token(model)) == _TABLE[name]
    assert model.name == name


_OURS = ("quickstart", "bench_nodes")


def test_every_model_file_is_a_row_or_ours(root: Path) -> None:
    assert {path.stem for path in (root / "configs" / "model").glob("*.yaml")} == {*_TABLE, *_OURS}


def test_parts_sum_to_the_total() -> None:
    for name in (*_TABLE, *_OURS):
        count = count_parameters(load_config(name).model)
        assert sum(count.by_part.values()) == count.total == count.active + count.gate_tables


_SMALL = ModelConfig(
    num_layers=2,
    hidden_size=10,
    num_attention_heads=3,
    intermediate_size=7,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=5,
    kv_lora_rank=6,
    kv_emb_dim=8,
    vocab_size=11,
)


def test_small_model_by_hand() -> None:
    layer = 10 * 18 + 10 * 8 + 6 + 6 * 27 + 8 * 27 + 2 * 27 + 15 * 10 + 3 * 70 + 20
    count = count_parameters(_SMALL)
    assert count.active == 110 + 2 * layer + 10
    assert count.gate_tables == 2 * 11 * 8
    assert kv_cache_elements_per_token(_SMALL) == 2 * (6 + 2)


def test_switches_change_what_they_name() -> None:
    active = count_parameters(_SMALL).active

    def difference(**change: object) -> int:
        return count_parameters(replace(_SMALL, **change)).active - active  # type: ignore[arg-type]

    assert difference(gate_norm=False) == -2 * 2 * 27
    assert difference(gate="add") == 0
    assert difference(tie_word_embeddings=False) == 110
    assert difference(q_lora_rank=3) == 2 * (10 * 3 + 3 + 3 * 18 - 10 * 18)
    assert difference(gate="none", kv_emb_dim=0) == -2 * (8 * 27 + 2 * 27)


def test_flops_by_hand() -> None:
    gemms = 10 * 18 + 10 * 8 + 6 * 27 + 8 * 27 + 15 * 10 + 3 * 70
    visible = (1 + 2 + 3 + 4) / 4  # causal: mean number of positions a token of 4 sees
    forward = 2 * (2 * gemms + 2 * 3 * (6 + 5) * visible) + 2 * 11 * 10
    flops = flops_per_token(_SMALL, 4)
    assert flops.forward == forward == sum(flops.by_part.values())
    assert flops.forward_backward == 3 * forward
    assert flops.by_part["gate_projection"] == 2 * 2 * 8 * 27


def test_flops_know_the_gate_and_not_the_embedding() -> None:
    plain = replace(_SMALL, gate="none", kv_emb_dim=0)
    gate = flops_per_token(_SMALL, 4).forward - flops_per_token(plain, 4).forward
    assert gate == 2 * 2 * 8 * 27
    untied = replace(_SMALL, tie_word_embeddings=False)
    assert flops_per_token(untied, 4) == flops_per_token(_SMALL, 4)


def test_mha_flops_by_hand() -> None:
    model = ModelConfig(
        attention="mha",
        gate="none",
        kv_emb_dim=0,
        num_layers=1,
        hidden_size=6,
        num_attention_heads=2,
        v_head_dim=3,
        intermediate_size=5,
        vocab_size=7,
    )
    assert flops_per_token(model, 3).forward == 2 * (6 * 18 + 36 + 2 * 30 + 2 * (3 + 3) * 2 + 42)

"""Counted FLOPs and parameters against what a built model really computes and holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.model.count import count_parameters, flops_per_token
from tests.bytes import MHA, MODEL
from tests.tiny import random_batches, tiny_run

MODELS = {
    "eg_mla": MODEL,
    "add_without_norm": replace(MODEL, gate="add", gate_norm=False),
    "mla": replace(MODEL, gate="none", kv_emb_dim=0),
    "q_lora": replace(MODEL, q_lora_rank=20),
    "mha": ModelConfig(**(MODEL.__dict__ | MHA)),
}


def _counted(model: ModelConfig, world: Any) -> tuple[dict[str, float], int, int]:
    """(operation -> FLOPs of a forward and backward pass, parameters, tokens)."""
    from torch.utils.flop_counter import FlopCounterMode

    from egmla_megatron.model.build import build_model

    train = {"seq_length": 32, "micro_batch_size": 2, "global_batch_size": 2}
    cfg = tiny_run(model, train=train, parallel={"attention_backend": "math"})  # batched products, which torch counts
    built = build_model(cfg, world)
    batch = next(random_batches(cfg))
    counter = FlopCounterMode(display=False)
    with counter:
        built.wrapped[0](batch.tokens_BS, batch.position_ids_BS, None, labels=batch.labels_BS).sum().backward()
    found: Counter[str] = Counter()
    for operation, count in counter.get_flop_counts()["Global"].items():
        found["attention" if "bmm" in str(operation) else "matrices"] += count
    return dict(found), sum(each.numel() for each in built.module.parameters()), batch.tokens_BS.numel()


@pytest.mark.parametrize("name", MODELS)
def test_flops_and_parameters_of_a_built_model(world: Any, name: str) -> None:
    model, length = MODELS[name], 32
    real, parameters, tokens = _counted(model, world)
    assert parameters == count_parameters(model).total
    parts = dict(flops_per_token(model, length).by_part)
    scores = parts.pop("attention_scores")
    assert real["matrices"] == 3 * tokens * sum(parts.values())
    # the plan counts the causal half, on average (length + 1) / 2 of the positions; this way computes all
    assert real["attention"] == pytest.approx(3 * tokens * scores * 2 * length / (length + 1))

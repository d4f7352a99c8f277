"""The runs whose collectives are counted, and their layouts on two ranks."""

from __future__ import annotations

from typing import Any

from egmla_megatron.config.schema import ModelConfig, RunConfig
from tests.tiny import tiny_run

__all__ = ["LAYOUTS", "bytes_run"]

# sizes that no two parts share, so that a formula cannot be right by the wrong part
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=80,
    num_attention_heads=4,
    intermediate_size=136,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=14,
    kv_lora_rank=24,
    kv_emb_dim=32,
    vocab_size=256,
    max_position_embeddings=64,
)
MHA = {"attention": "mha", "gate": "none", "kv_emb_dim": 0, "v_head_dim": 20}
EQUAL_HEADS = {"v_head_dim": 20}  # the flash kernel, which keeps no scores
_SHARDED = {"optimizer": {"distributed": True}}
_GATE = {"gate_group": 2, "unique_ids": False}  # a row for every token: their number is known exactly
_TP: dict[str, Any] = {"tensor": 2}
_TP_SP = {**_TP, "sequence": True}
_CP = {"context": 2, "unique_ids": False}
_OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {  # those of one process group follow each other
    "dp2_sharded": _SHARDED,
    "dp2_sharded_overlaps": {**_SHARDED, "parallel": _OVERLAPS},
    "dp2_gate2": {"parallel": _GATE},
    "dp2_gate2_all_gather": {"parallel": {**_GATE, "gate_exchange": "all_gather"}},
    "tp2": {"parallel": _TP},
    "tp2_full": {"parallel": _TP, "train": {"recompute": "full"}},
    "tp2_sp_sharded": {**_SHARDED, "parallel": _TP_SP},
    "tp2_sp_full": {"parallel": _TP_SP, "train": {"recompute": "full"}},
    "tp2_sp_selective": {"parallel": _TP_SP, "train": {"recompute": "selective"}},
    "tp2_sp_q_lora": {"parallel": _TP_SP, "model": {"q_lora_rank": 20}},
    "tp2_sp_mha": {"parallel": _TP_SP, "model": MHA},
    "tp2_gate2": {"parallel": {**_TP, **_GATE}},
    "tp2_gate2_all_gather": {"parallel": {**_TP, **_GATE, "gate_exchange": "all_gather"}},
    "pp2_vpp2": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "model": {"num_layers": 4}},
    "cp2_full": {"parallel": {"context": 2}, "train": {"recompute": "full"}},
    "cp2": {"parallel": _CP, "model": EQUAL_HEADS},
    "cp2_deep": {"parallel": _CP, "model": {**EQUAL_HEADS, "num_layers": 4}},
}


def bytes_run(settings: dict[str, dict[str, Any]]) -> RunConfig:
    """A step of two micro-batches under `settings`, section -> key -> value."""
    model = ModelConfig(**(MODEL.__dict__ | settings.get("model", {})))
    train = {"seq_length": 64, "micro_batch_size": 1, "global_batch_size": 4} | settings.get("train", {})
    sections = {name: values for name, values in settings.items() if name not in ("model", "train")}
    return tiny_run(model, train=train, **sections)

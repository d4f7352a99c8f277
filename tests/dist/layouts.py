"""The layouts that must all be one and the same training, and the models that are trained.

Numbers of ranks are 2 throughout; the serial reference is the first layout on one rank.
"""

from __future__ import annotations

from typing import Any

from egmla_megatron.config.schema import ModelConfig, RunConfig
from tests.tiny import MHA, PLAIN, tiny_model, tiny_run

LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {},  # on one rank
    "dp2": {},
    "dp2_distributed": {"distributed": True},
    "dp2_gate2": {"gate_group": 2},
    "dp2_gate2_distributed": {"gate_group": 2, "distributed": True},
    "dp2_gate2_overlap": {"gate_group": 2, "distributed": True, "overlap_grad_reduce": True},
    "dp2_gate2_overlap_param": {
        "gate_group": 2,
        "distributed": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "dp2_gate2_full": {"gate_group": 2, "recompute": "full"},
    "dp2_every_id": {"unique_ids": False},
    "dp2_gate2_every_id": {"gate_group": 2, "unique_ids": False},
    "dp2_gate2_all_gather": {"gate_group": 2, "gate_exchange": "all_gather", "distributed": True},
    "dp2_gate2_all_gather_every_id": {"gate_group": 2, "gate_exchange": "all_gather", "unique_ids": False},
    "dp2_gate2_per_layer": {"gate_group": 2, "gate_granularity": "per_layer"},
    "tp2": {"tensor": 2},
    "tp2_distributed": {"tensor": 2, "distributed": True},
    "tp2_gate2": {"tensor": 2, "gate_group": 2},
    "tp2_gate2_all_gather": {"tensor": 2, "gate_group": 2, "gate_exchange": "all_gather"},
    "tp2_gate2_all_gather_per_layer": {
        "tensor": 2,
        "gate_group": 2,
        "gate_exchange": "all_gather",
        "gate_granularity": "per_layer",
        "unique_ids": False,
    },
    "tp2_sp": {"tensor": 2, "sequence": True},
    "tp2_sp_gate2": {"tensor": 2, "sequence": True, "gate_group": 2},
    "tp2_sp_gate2_selective": {"tensor": 2, "sequence": True, "gate_group": 2, "recompute": "selective"},
    "tp2_sp_gate2_full": {"tensor": 2, "sequence": True, "gate_group": 2, "recompute": "full"},
    "tp2_gate2_selective": {"tensor": 2, "gate_group": 2, "recompute": "selective"},
    "pp2": {"pipeline": 2},
    "pp2_distributed": {"pipeline": 2, "distributed": True},
}
COMPARED: dict[str, ModelConfig] = {
    "mul": tiny_model(),
    "add_q_lora_untied": tiny_model(gate="add", q_lora_rank=10, tie_word_embeddings=False),
    "add_without_norm": tiny_model(gate="add", gate_norm=False),
    "mla": tiny_model(**PLAIN),
    "mha": tiny_model(**MHA),
}
# No serial run draws the same numbers: here the replicas of a weight must stay identical, and that is all.
DROPOUT = tiny_model(hidden_dropout=0.2, attention_dropout=0.2)
OTHER_LAYOUTS = {
    "add_q_lora_untied": ("dp2_gate2_distributed", "tp2", "tp2_sp_gate2", "pp2_distributed"),
    "add_without_norm": ("tp2_gate2", "tp2_sp_gate2_selective"),
    "mla": ("dp2_distributed", "tp2_distributed", "tp2_sp", "pp2"),
    "mha": ("dp2", "tp2", "tp2_sp", "pp2"),
    "dropout": ("dp2_gate2", "tp2", "tp2_gate2", "tp2_sp", "tp2_sp_gate2_full", "pp2"),
}
SECTION_OF = {"distributed": "optimizer", "recompute": "train"}


def cases() -> list[tuple[str, str]]:
    """(model, layout) of every case: all layouts for the main model, those that differ for the others."""
    found = [("mul", layout) for layout in LAYOUTS if layout != "serial"]
    for model, layouts in OTHER_LAYOUTS.items():
        found += [(model, layout) for layout in layouts]
    return found


def run_config(model: str, layout: str) -> RunConfig:
    """The run of a model under a layout: 4 micro-batches of 2 sequences a step, so gradients accumulate."""
    sections: dict[str, Any] = {
        "train": {"global_batch_size": 8},
        "data": {"eod_mask_loss": True},  # the batches' masks have holes: the mean is over the tokens that count
        # a large eps: where a gradient is zero but for rounding, Adam's ratio would be rounding too
        "optimizer": {"eps": 1e-3, "clip_grad": 0.0, "weight_decay": 0.1, "gate_table_lr_ratio": 2.0},
        "parallel": {},
    }
    for name, value in LAYOUTS[layout].items():
        sections[SECTION_OF.get(name, "parallel")][name] = value
    return tiny_run(COMPARED.get(model, DROPOUT), **sections)

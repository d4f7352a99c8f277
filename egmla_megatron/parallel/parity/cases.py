"""The layouts that must all be one and the same training, and the tiny models that are trained.

Nothing here imports torch: the command lists and checks its cases without it.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import Any

from egmla_megatron.config.schema import (
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    RunSection,
    TrainConfig,
)

__all__ = [
    "MHA",
    "MODELS",
    "PLAIN",
    "RANKS",
    "TINY",
    "Case",
    "all_cases",
    "case_config",
    "chain_config",
    "matching_cases",
]

# Every size that tensor parallelism cuts is even. The stds make gradients of the size of the weights.
TINY = ModelConfig(
    name="tiny",
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    intermediate_size=20,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    kv_lora_rank=8,
    kv_emb_dim=6,
    vocab_size=64,
    max_position_embeddings=32,
    init_std=0.2,
)
PLAIN: dict[str, Any] = {"gate": "none", "kv_emb_dim": 0}
MHA: dict[str, Any] = {**PLAIN, "attention": "mha", "v_head_dim": 6}
DEEP = replace(TINY, num_layers=4, kv_emb_dim=12)  # for interleaved pipelines, and gate groups of 3 and 4
MODELS: dict[str, ModelConfig] = {
    "mul": TINY,
    "add_q_lora_untied": replace(TINY, gate="add", q_lora_rank=10, tie_word_embeddings=False),
    "add_no_norm": replace(TINY, gate="add", gate_norm=False),
    "mla": replace(TINY, **PLAIN),
    "mha": replace(TINY, **MHA),
    "every_token": TINY,  # as mul, with a loss mask without holes: another way through the schedules
    "deep": DEEP,
    "deep_mha": replace(TINY, num_layers=4, **MHA),
    # no serial run draws the same numbers: here replicas of a weight must stay identical, and that is all
    "dropout": replace(TINY, hidden_dropout=0.2, attention_dropout=0.2),
}
RANKS = (1, 2, 4)  # numbers of ranks that the layouts below are for
UNPLANNED = "unplanned"  # layouts that end so: the model is called with token ids alone, and finds the rows itself
_OVERLAPS = {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
_GATHER = {"gate_exchange": "all_gather"}
_ALONE = {"unique_ids": False}
_TP_SP = {"tensor": 2, "sequence": True}
_VPP = {"pipeline": 2, "virtual_pipeline": 2}

# name -> (ranks, settings of the sections parallel, train and optimizer)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "serial": (1, {}),
    "every_id": (1, _ALONE),
    "recompute_selective": (1, {"recompute": "selective"}),
    "recompute_full": (1, {"recompute": "full"}),
    "no_accumulation": (1, {"micro_batch_size": 8}),
    "distributed": (1, {"distributed": True}),
    "overlap_param": (1, _OVERLAPS),
    "dp2": (2, {}),
    "dp2_distributed": (2, {"distributed": True}),
    "dp2_every_id": (2, _ALONE),
    "dp2_overlap": (2, {"overlap_grad_reduce": True}),
    "dp2_overlap_distributed": (2, {"distributed": True, "overlap_grad_reduce": True}),
    "dp2_gate2": (2, {"gate_group": 2}),
    "dp2_gate2_no_accumulation": (2, {"gate_group": 2, "micro_batch_size": 4}),
    "dp2_gate2_distributed": (2, {"gate_group": 2, "distributed": True}),
    "dp2_gate2_overlap": (2, {"gate_group": 2, "distributed": True, "overlap_grad_reduce": True}),
    "dp2_gate2_overlap_param": (2, {"gate_group": 2, **_OVERLAPS}),
    "dp2_gate2_full": (2, {"gate_group": 2, "recompute": "full"}),
    "dp2_gate2_every_id": (2, {"gate_group": 2, **_ALONE}),
    "dp2_gate2_all_gather": (2, {"gate_group": 2, **_GATHER, "distributed": True}),
    "dp2_gate2_all_gather_every_id": (2, {"gate_group": 2, **_GATHER, **_ALONE}),
    "dp2_gate2_per_layer": (2, {"gate_group": 2, "gate_granularity": "per_layer"}),
    f"dp2_gate2_{UNPLANNED}": (2, {"gate_group": 2}),
    f"dp2_gate2_all_gather_{UNPLANNED}": (2, {"gate_group": 2, **_GATHER}),
    "tp2": (2, {"tensor": 2}),
    "tp2_distributed": (2, {"tensor": 2, "distributed": True}),
    "tp2_gate2": (2, {"tensor": 2, "gate_group": 2}),
    "tp2_gate2_all_gather": (2, {"tensor": 2, "gate_group": 2, **_GATHER}),
    "tp2_gate2_all_gather_per_layer": (
        2,
        {"tensor": 2, "gate_group": 2, **_GATHER, **_ALONE, "gate_granularity": "per_layer"},
    ),
    "tp2_gate2_selective": (2, {"tensor": 2, "gate_group": 2, "recompute": "selective"}),
    "tp2_sp": (2, _TP_SP),
    "tp2_sp_gate2": (2, {**_TP_SP, "gate_group": 2}),
    "tp2_sp_gate2_selective": (2, {**_TP_SP, "gate_group": 2, "recompute": "selective"}),
    "tp2_sp_gate2_full": (2, {**_TP_SP, "gate_group": 2, "recompute": "full"}),
    "pp2": (2, {"pipeline": 2}),
    "pp2_distributed": (2, {"pipeline": 2, "distributed": True}),
    "pp2_full": (2, {"pipeline": 2, "recompute": "full"}),  # two micro-batches in flight on the first stage
    "pp2_selective": (2, {"pipeline": 2, "recompute": "selective"}),
    "pp2_vpp2": (2, _VPP),
    "pp2_vpp2_distributed": (2, {**_VPP, "distributed": True}),
    "pp2_vpp2_overlap_param": (2, {**_VPP, **_OVERLAPS}),
    "pp2_vpp2_full": (2, {**_VPP, "recompute": "full"}),
    "cp2": (2, {"context": 2}),
    "cp2_distributed": (2, {"context": 2, "distributed": True}),
    "cp2_gate2": (2, {"context": 2, "gate_group": 2}),
    "cp2_gate2_all_gather": (2, {"context": 2, "gate_group": 2, **_GATHER}),
    "cp2_gate2_full": (2, {"context": 2, "gate_group": 2, "recompute": "full"}),
    "cp2_selective": (2, {"context": 2, "recompute": "selective"}),
    "dp4_gate2": (4, {"gate_group": 2}),
    "dp4_gate2_overlap": (4, {"gate_group": 2, "overlap_grad_reduce": True}),
    "dp4_gate2_distributed": (4, {"gate_group": 2, "distributed": True}),
    "dp4_gate4": (4, {"gate_group": 4}),
    "dp4_gate4_all_gather": (4, {"gate_group": 4, **_GATHER}),
    "tp2_dp2_gate2": (4, {"tensor": 2, "gate_group": 2}),
    "tp2_dp2_gate4": (4, {"tensor": 2, "gate_group": 4}),
    "tp2_sp_dp2_gate4_all_gather": (4, {**_TP_SP, "gate_group": 4, **_GATHER, "distributed": True}),
    "tp2_sp_dp2_gate4_full": (4, {**_TP_SP, "gate_group": 4, "recompute": "full"}),
    "tp2_dp2_gate4_every_id": (4, {"tensor": 2, "gate_group": 4, **_ALONE}),
    "tp4_gate2_all_gather": (4, {"tensor": 4, "gate_group": 2, **_GATHER, "distributed": True}),
    "tp2_cp2_gate2": (4, {"tensor": 2, "context": 2, "gate_group": 2}),
    "cp4_gate2_all_gather": (4, {"context": 4, "gate_group": 2, **_GATHER}),
    "cp2_dp2_gate4_all_gather_full": (4, {"context": 2, "gate_group": 4, **_GATHER, "recompute": "full"}),
    "pp2_dp2_gate2_all_gather_full": (4, {"pipeline": 2, "gate_group": 2, **_GATHER, "recompute": "full"}),
    "tp4_sp_gate4": (4, {"tensor": 4, "sequence": True, "gate_group": 4}),
    "pp2_dp2_gate2": (4, {"pipeline": 2, "gate_group": 2}),
    "pp2_tp2_sp_gate2": (4, {"pipeline": 2, **_TP_SP, "gate_group": 2}),
    "pp2_vpp2_dp2_gate2_overlap_param": (4, {**_VPP, "gate_group": 2, **_OVERLAPS}),
    "pp2_vpp2_cp2": (4, {**_VPP, "context": 2}),
    "pp4": (4, {"pipeline": 4}),
    "cp2_pp2_gate2": (4, {"context": 2, "pipeline": 2, "gate_group": 2}),
    "cp2_dp2_gate4_distributed": (4, {"context": 2, "gate_group": 4, "distributed": True}),
    "tp2_sp_cp2_gate4": (4, {**_TP_SP, "context": 2, "gate_group": 4}),
    "cp4": (4, {"context": 4}),
}
# models besides the first of each number of ranks, under the layouts where they could differ
OTHERS: dict[str, tuple[str, ...]] = {
    "add_q_lora_untied": ("dp2_gate2_distributed", "tp2", "tp2_sp_gate2", "pp2_distributed"),
    "add_no_norm": ("tp2_gate2", "tp2_sp_gate2_selective"),
    "mla": ("dp2_distributed", "tp2_distributed", "tp2_sp", "pp2", "cp2"),
    "mha": ("dp2", "tp2", "tp2_sp", "pp2", "cp2", "cp2_selective"),
    "every_token": ("dp2_gate2", "tp2_sp_gate2", "pp2", "cp2_distributed", "cp2_gate2"),
    "deep_mha": ("pp2_vpp2",),
    "dropout": ("dp2_gate2", "tp2", "tp2_gate2", "tp2_sp", "tp2_sp_gate2_full", "pp2", "cp2_gate2_full"),
}
_SECTION = {"distributed": "optimizer", "recompute": "train", "micro_batch_size": "train"}


@dataclass(frozen=True)
class Case:
    """One model under one layout."""

    model: str
    layout: str

    @property
    def name(self) -> str:
        """`model-layout`."""
        return f"{self.model}-{self.layout}"

    @property
    def planned(self) -> bool:
        """Whether the loader finds the rows of the gating tables, as in training."""
        return not self.layout.endswith(UNPLANNED)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return LAYOUTS[self.layout][0]


def all_cases(ranks: int) -> list[Case]:
    """Cases on so many ranks. One rank: the serial reference of every model comes first."""
    cases = [Case(model, "serial") for model in MODELS if model != "dropout"] if ranks == 1 else []
    for layout, (size, settings) in LAYOUTS.items():
        if size == ranks and layout != "serial":
            main = "deep" if ranks == 4 or settings.get("virtual_pipeline", 1) > 1 else "mul"
            cases.append(Case(main, layout))
    return cases + [Case(m, name) for m, names in OTHERS.items() for name in names if LAYOUTS[name][0] == ranks]


def matching_cases(ranks: int, patterns: str) -> list[Case]:
    """Cases on so many ranks whose names match one of the comma-separated patterns (`*`, `?`)."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    return [case for case in all_cases(ranks) if any(fnmatch.fnmatch(case.name, pattern) for pattern in wanted)]


def case_config(case: Case, *, gpus: bool = False) -> RunConfig:
    """The run of a case: 8 sequences of 16 tokens a step, 2 in a micro-batch, so gradients accumulate."""
    settings = dict(LAYOUTS[case.layout][1])
    if gpus:
        settings["attention_backend"] = "math"  # takes heads of any size, in fp32
    return _config(MODELS[case.model], settings, masked=case.model != "every_token")


def chain_config(settings: dict[str, Any], folder: str) -> RunConfig:
    """A run of the model of four layers, with 12 sequences a step: on 1, 2, 3 or 4 ranks."""
    cfg = _config(DEEP, {**settings, "micro_batch_size": 1}, masked=True)
    return replace(cfg, run=replace(cfg.run, dir=folder), train=replace(cfg.train, global_batch_size=12))


def _config(model: ModelConfig, settings: dict[str, Any], *, masked: bool) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {"parallel": {}, "train": {}, "optimizer": {}}
    for name, value in settings.items():
        sections[_SECTION.get(name, "parallel")][name] = value
    train = {"micro_batch_size": 2, "recompute": "none", **sections["train"]}
    optimizer = {"distributed": False, **sections["optimizer"]}
    return RunConfig(
        run=RunSection(name="parity", dir="runs/parity", seed=7),
        model=model,
        # masks with holes weigh micro-batches differently: the mean is over the tokens that count
        data=DataConfig(num_workers=0, eod_mask_loss=masked),
        train=TrainConfig(seq_length=16, global_batch_size=8, steps=6, precision="fp32", eval_interval=0, **train),
        # a large eps: where a gradient is zero but for rounding, Adam's ratio would be rounding too
        optimizer=OptimizerConfig(
            lr=1e-2, warmup_steps=2, eps=1e-3, clip_grad=0.0, gate_table_lr_ratio=2.0, **optimizer
        ),
        parallel=ParallelConfig(implementation="torch", **sections["parallel"]),
        logging=LoggingConfig(tensorboard=False, wandb="disabled"),
    )

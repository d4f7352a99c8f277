"""Resident memory of a rank that trains on a CPU: the process itself and what it computes with.

The process with everything imported and nothing built is measured where it runs (`resident_mib`), since libraries
differ from machine to machine; tensors are counted from the configuration; what else appears in the first steps is a
constant of two measurements.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

from egmla_megatron.config.check import Layout
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.report.memory import Memory, memory_per_rank

__all__ = ["predict_resident_mib", "resident_mib"]

_MIB = 2**20
# Communicators, code that is loaded when it first runs, gaps between blocks below a MiB (larger ones leave none, see
# parallel/heap.py). With evaluations and checkpoints the quickstart's model had 86 MiB beyond process and tensors on
# one rank with 4 sequences, 36 on two gloo ranks, and 20 less than those with 8 sequences: not all large tensors are
# there at once.
OTHER_MIB = 70.0


def resident_mib() -> float | None:
    """Resident set of this process now; None where there is no /proc (not Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def predict_resident_mib(cfg: RunConfig, layout: Layout, process_mib: float) -> dict[str, float]:
    """Peak resident set of the rank that needs most, by part and in `total`.

    Args:
        process_mib: `resident_mib()` after all imports, before groups are opened and the model is built.
    """
    stages = [_on_cpu(cfg, layout, stage) for stage in range(layout.pp)]
    worst = max(stages, key=lambda memory: memory.total)
    parts = {"process": process_mib, "libraries_and_gaps": OTHER_MIB}
    parts |= {name: size / _MIB for name, size in asdict(worst).items()}
    return parts | {"total": sum(parts.values())}


def _on_cpu(cfg: RunConfig, layout: Layout, stage: int) -> Memory:
    """As on a GPU by torch's layers, and what a CPU keeps besides: normalised inputs of RMSNorms, and scores."""
    found = memory_per_rank(cfg, layout, stage, te=False, triton=False)
    model, wide = cfg.model, cfg.train.element_bytes
    batch, length = cfg.train.micro_batch_size, cfg.train.seq_length // layout.cp
    kept, now = 0, 0
    if model.attention == "mla":
        kept += batch * length * (2 * model.hidden_size + model.kv_lora_rank + model.q_lora_rank)
    key = model.qk_nope_head_dim + model.qk_rope_head_dim
    if model.attention == "mla" and (key != model.v_head_dim or model.attention_dropout):
        heads = model.num_attention_heads // layout.tp  # without the flash kernel
        scores = batch * heads * length * cfg.train.seq_length
        kept += scores + 2 * batch * length * heads * key  # probabilities, scaled queries and keys
        now = 3 * scores
    if cfg.train.recompute != "none":
        kept, now = 0, now + kept
    in_flight = min(layout.pp - stage, layout.num_microbatches) if layout.pp > 1 else 1
    return replace(
        found,
        activations=found.activations + in_flight * layout.layers_per_stage * wide * kept,
        temporary=found.temporary + wide * now,
    )

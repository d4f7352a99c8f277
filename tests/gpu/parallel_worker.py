"""Worker for two GPUs, in bf16, by the layers and kernels of one name.

parallel_worker.py FOLDER te|cudnn|efficient|flash|math steps|gradients

steps: the same six steps under several layouts; gradients: those of one step under tensor parallelism, by tensor.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from egmla_megatron.config.check import check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.parallel.parity.compare import drifted, own_part
from egmla_megatron.parallel.parity.training import Snapshot, train_case
from egmla_megatron.parallel.world import World, close_world, form_groups, open_world
from tests.dist.reshard_worker import Run
from tests.gpu.small_model import SMALL
from tests.tiny import tiny_run

STEPS = 6  # a graph is captured in the fourth
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2_gate2_graph": {"gate_group": 2, "cuda_graph": True},
    "dp2_gate2_all_gather_graph": {
        "gate_group": 2,
        "gate_exchange": "all_gather",
        "cuda_graph": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "cp2": {"context": 2},
    "cp2_gate2": {"context": 2, "gate_group": 2},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "pp2_vpp2_overlap": {"pipeline": 2, "virtual_pipeline": 2, "overlap_grad_reduce": True},
}


TENSOR_PARALLEL: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2},
    "tp2_gate2": {"tensor": 2, "gate_group": 2},
    "tp2_sp": {"tensor": 2, "sequence": True},
    "tp2_sp_gate2": {"tensor": 2, "sequence": True, "gate_group": 2},
}


def run_config(kernel: str, settings: dict[str, Any]) -> RunConfig:
    """Four micro-batches of two sequences of 512 tokens a step."""
    equal_heads = {"qk_nope_head_dim": 64, "v_head_dim": 128} if kernel == "flash" else {}
    by_te = kernel == "te"
    graph = settings.get("cuda_graph", False)
    parallel = {name: value for name, value in settings.items() if name != "cuda_graph"}
    return tiny_run(
        replace(SMALL, **equal_heads),
        train={"seq_length": 512, "global_batch_size": 8, "precision": "bf16", "cuda_graph": graph},
        optimizer={"lr": 1e-3, "distributed": True},
        parallel={
            "implementation": "te" if by_te else "torch",
            "attention_backend": "auto" if by_te else kernel,
            **parallel,
        },
    )


def take_steps(kernel: str, base: World) -> dict[str, Any]:
    """Layout -> losses and norms."""
    found = {}
    for layout in LAYOUTS if kernel in ("te", "cudnn") else ("dp2", "cp2"):
        cfg, world = form(kernel, base, LAYOUTS[layout])
        print(f"rank {base.rank}: {kernel} {layout}", flush=True)
        found[layout] = Run(cfg, world).take(0, STEPS)
    return found


def compare_gradients(kernel: str, base: World) -> dict[str, Any]:
    """Layout -> {tensor: relative error of the norm against data parallelism}, and replicas that are not identical."""
    cfg, world = form(kernel, base, {})
    whole, _ = train_case(cfg, world)
    found: dict[str, Any] = {}
    for layout, settings in TENSOR_PARALLEL.items():
        cfg, world = form(kernel, base, settings)
        mine, named = train_case(cfg, world)
        found[layout] = {"drifted": drifted(named, world), **relative_errors(mine, whole, named, cfg, world)}
    return found


def relative_errors(
    mine: Snapshot, whole: Snapshot, named: dict[str, Any], cfg: RunConfig, world: World
) -> dict[str, float]:
    """Of this rank's part of every gradient. RoPE rows of the down-projection are few, so they count apart."""
    errors = {}
    for name, got in mine["gradient"].items():
        reference = whole["gradient"][name].float()
        parts = {"": (got, own_part(reference, name, named[name], cfg, world))}
        if name.endswith("linear_kv_down_proj.weight") and got.shape == reference.shape:  # else the last rank's part
            rope = cfg.model.qk_rope_head_dim
            parts = {"": (got[:-rope], reference[:-rope]), "@rope": (got[-rope:], reference[-rope:])}
        for suffix, (here, there) in parts.items():
            errors[name + suffix] = float((here.float() - there).norm() / there.norm().clamp_min(1e-9))
    return errors


def form(kernel: str, base: World, settings: dict[str, Any]) -> tuple[RunConfig, World]:
    """The run and its groups."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # megatron-core sets them per process and refuses a second, different model
    cfg = run_config(kernel, settings)
    return cfg, form_groups(cfg, check_config(cfg, base.size), base.local_rank, base.device, base.store)


def main(folder: Path, kernel: str, what: str) -> None:
    """One kind of check; every rank leaves what it found."""
    first = run_config(kernel, LAYOUTS["dp2_gate2_graph"])  # its stream is one that can be captured, for all layouts
    base = open_world(first, check_config(first, int(os.environ["WORLD_SIZE"])))
    found = take_steps(kernel, base) if what == "steps" else compare_gradients(kernel, base)
    (folder / f"rank{base.rank}.json").write_text(json.dumps(found))
    close_world()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(220, exit=True)  # a hang says where
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])

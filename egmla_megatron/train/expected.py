"""What the line of a start says after a look at data and disk, on the first rank alone: no other writes it."""

from __future__ import annotations

from dataclasses import asdict

from egmla_megatron.checkpoint.choose import left_out
from egmla_megatron.report.cpu_memory import predict_resident_mib
from egmla_megatron.report.distinct import with_measured_ids
from egmla_megatron.report.memory import worst_stage
from egmla_megatron.train.setup import Prepared

__all__ = ["passed_over", "predicted_memory_mib"]


def passed_over(run: Prepared) -> list[str]:
    """Newer checkpoints of the run that are damaged, as `choose.left_out`; none on all ranks but the first: every data
    file of every checkpoint is looked up for it, on a disk that all nodes share.
    """
    return left_out(run.cfg, run.unmarked) if run.world.is_first else []


def predicted_memory_mib(run: Prepared, process_mib: float | None) -> dict[str, float] | None:
    """MiB of the rank that needs most, by part; None on a CPU where the process itself cannot be measured, and on all
    ranks but the first, which alone writes it: a thousand sequences of the data are read for it.
    """
    if not run.world.is_first:
        return None
    cfg, layout = with_measured_ids(run.cfg)[0], run.world.layout
    if run.world.device.type != "cuda":
        return None if process_mib is None else predict_resident_mib(cfg, layout, process_mib)
    te, triton = run.built.implementation == "te", run.built.kernels == "triton"
    _, memory = worst_stage(cfg, layout, te=te, triton=triton)
    return {name: size / 2**20 for name, size in (asdict(memory) | {"total": memory.total}).items()}

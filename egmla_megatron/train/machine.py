"""Whether this machine has what the configuration asks for, without importing torch."""

from __future__ import annotations

import importlib.util

from egmla_megatron.config.check_attention import check_attention
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.environment import gpu_count, whole_number
from egmla_megatron.errors import UserError

__all__ = ["check_machine"]


def check_machine(cfg: RunConfig) -> None:
    """Transformer Engine, kernels and CUDA graphs where they are asked for, and a GPU for every rank of this node.

    Raises:
        UserError: names what is missing.
    """
    gpus, ranks = gpu_count(), whole_number("LOCAL_WORLD_SIZE", 1, 1)
    if cfg.parallel.implementation == "te":
        importable = importlib.util.find_spec("transformer_engine") is not None
        if not (importable and gpus):
            missing = "no CUDA device is visible" if importable else "transformer_engine is not installed"
            raise UserError(
                f"parallel.implementation=te: {missing}; set parallel.implementation=torch, or install the extra 'te' "
                "on a GPU machine (EGMLA_EXTRAS=dev,te)"
            )
    check_attention(cfg, cuda=gpus > 0)
    needs_gpu = {"parallel.kernels": (cfg.parallel.kernels, "triton"), "train.fp8": (cfg.train.fp8, "tensorwise")}
    for name, (got, wanted) in needs_gpu.items():
        if got == wanted and not gpus:
            other = "torch" if name == "parallel.kernels" else "none"
            raise UserError(f"{name}: got {got}, allowed {other} without a CUDA device; set {name}={other}")
    if cfg.train.cuda_graph and not gpus:
        raise UserError(
            "train.cuda_graph: got true, allowed false and auto without a CUDA device; set train.cuda_graph=auto"
        )
    if 0 < gpus < ranks:
        raise UserError(
            f"ranks of this machine: got {ranks}, allowed up to {gpus}, one for each GPU; start fewer "
            "(EGMLA_NPROC, --nproc-per-node)"
        )

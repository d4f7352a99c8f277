"""Which attention kernel of torch can run what, without importing torch."""

from __future__ import annotations

from egmla_megatron.config.schema import ModelConfig, RunConfig
from egmla_megatron.config.workable import refuse

__all__ = ["check_attention", "check_kernel", "equal_heads"]

_KERNELS = ("cudnn", "flash", "efficient", "math")
_HALF_ONLY = ("cudnn", "flash")  # on GPUs


def equal_heads(model: ModelConfig) -> bool:
    """Whether heads of q and k are as wide as those of v."""
    return model.attention == "mha" or model.qk_nope_head_dim + model.qk_rope_head_dim == model.v_head_dim


def check_kernel(name: str, *, cuda: bool, precision: str, equal: bool, dropout: bool) -> None:
    """Raises UserError where torch has no attention kernel `name` (auto: any) for that."""
    if name == "auto":
        return
    what = "parallel.attention_backend"
    fix = f"set {what}=auto"
    if name not in _KERNELS:
        allowed = f"auto, {', '.join(_KERNELS)}"
        refuse(f"{what} with layers of torch", name, allowed, f"{fix}, or on a GPU parallel.implementation=te")
    if cuda:
        if precision == "fp32" and name in _HALF_ONLY:
            refuse(f"{what} with train.precision=fp32", name, "auto, efficient, math", fix)
        return
    on_cpu = "auto, flash, math" if equal and not dropout else "auto, math"
    if name in ("cudnn", "efficient"):
        refuse(f"{what}: that kernel runs on GPUs, and no CUDA device is visible", name, on_cpu, fix)
    if name == "flash" and not equal:
        refuse(f"{what}: on a CPU that kernel wants heads of q, k and v of one size", name, on_cpu, fix)
    if name == "flash" and dropout:
        refuse(f"{what}: on a CPU that kernel has no dropout (model.attention_dropout)", name, on_cpu, fix)


def check_attention(cfg: RunConfig, *, cuda: bool) -> None:
    """The same for a configuration, where it is sure that its layers are torch's.

    Raises:
        UserError: the kernel cannot run.
    """
    if cfg.parallel.implementation == "te" or (cuda and cfg.parallel.implementation == "auto"):
        return  # Transformer Engine's attention, or only known where the model is built
    model, train = cfg.model, cfg.train
    check_kernel(
        cfg.parallel.attention_backend,
        cuda=cuda,
        precision=train.precision,
        equal=equal_heads(model),
        dropout=model.attention_dropout > 0,
    )

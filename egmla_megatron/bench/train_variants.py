"""What `tools/bench_train.py` compares: a configuration, and the same with some settings changed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = ["VARIANTS", "TrainVariant", "choose_variants", "train_config"]


@dataclass(frozen=True)
class TrainVariant:
    """A name and the settings that make it."""

    name: str
    settings: tuple[str, ...]  # section.key=value
    reported: bool = False  # every step through the trainer's reporting and its sinks, whose time counts


VARIANTS = {
    name: TrainVariant(name, settings)
    for name, settings in {
        "base": (),
        "mla": ("model.gate=none", "model.kv_emb_dim=0"),
        "gate_add": ("model.gate=add",),
        "no_gate_norm": ("model.gate_norm=false",),
        "every_id": ("parallel.unique_ids=false",),
        "torch_kernels": ("parallel.kernels=torch",),
        "te": ("parallel.implementation=te",),
        "torch": ("parallel.implementation=torch",),
        "graph": ("train.cuda_graph=true",),
        "no_fused_grads": ("parallel.fused_grad_accumulation=false",),
        "own_master_weights": ("optimizer.fused_master_weights=false",),
        "fp8": ("train.fp8=tensorwise",),
        "recompute": ("train.recompute=full",),
        # what reporting costs: base+reported beside base; its step times alone: reported+no_step_times
        "reported": (),
        "no_step_times": ("logging.step_times=false",),
    }.items()
}
_REPORTED = "reported"


def choose_variants(names: Sequence[str]) -> tuple[TrainVariant, ...]:
    """Of words like `mla`, `mla+graph`, or `mine:section.key=value,section.key=value`, in their order.

    Raises:
        UserError: an unknown name, or one that comes twice.
    """
    found: dict[str, TrainVariant] = {}
    for word in names:
        name, colon, own = word.partition(":")
        parts = [] if colon else name.split("+")
        unknown = [part for part in parts if part not in VARIANTS]
        if unknown or not name or (colon and not own):
            raise UserError(
                f"--variants: got {word!r}, allowed {', '.join(VARIANTS)}, several joined by +, or "
                "NAME:section.key=value,...; separate them by spaces"
            )
        if name in found:
            raise UserError(f"--variants: got {name!r} twice, allowed once; give one of them another name")
        settings = own.split(",") if colon else [item for part in parts for item in VARIANTS[part].settings]
        found[name] = TrainVariant(name, tuple(settings), _REPORTED in parts)
    return tuple(found.values())


def train_config(
    config: str, overrides: Sequence[str], variant: TrainVariant, schedule: Schedule, *, cuda: bool
) -> RunConfig:
    """The run of a variant: constant learning rate, no validation, synthetic ids unless data.train is overridden, no
    CUDA graph unless an override or the variant asks for one, whatever `config` says."""
    own = {
        "data.train": "[]",
        "data.valid": "[]",
        "data.cache_dir": str(Path(tempfile.gettempdir(), "egmla-bench-train")),
        "train.steps": str(schedule.total),
        "train.cuda_graph": "false",
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": "0",
    }
    if not cuda:
        own |= {"train.precision": "fp32", "data.num_workers": "0"}
    settings = [*(f"{key}={value}" for key, value in own.items()), *overrides, *variant.settings]
    return load_config(config, settings, gpu=cuda)

"""What `tools/bench_train.py` compares: a configuration, and the same with some settings changed."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.train.machine import check_machine

__all__ = [
    "VARIANTS",
    "TrainVariant",
    "checked_variant",
    "choose_variants",
    "effective",
    "precision_remark",
    "same_as",
    "train_config",
]

_SETTING = re.compile(r"\s*\w+\.\w+\s*=")


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
        "whole_master_weights": ("optimizer.store_param_remainders=false",),
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
        settings = _split(own) if colon else [item for part in parts for item in VARIANTS[part].settings]
        found[name] = TrainVariant(name, tuple(settings), _REPORTED in parts)
    return tuple(found.values())


def _split(own: str) -> list[str]:
    """Settings that commas join; commas in brackets or quotes, or with no section.key= behind them, are of values."""
    settings, depth, quote, begin = [], 0, "", 0
    for at, letter in enumerate(own):
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif letter in "[]":
            depth += 1 if letter == "[" else -1
        elif letter == "," and depth == 0 and _SETTING.match(own, at + 1):
            settings.append(own[begin:at])
            begin = at + 1
    return [*settings, own[begin:]]


def checked_variant(
    config: str, overrides: Sequence[str], variant: TrainVariant, schedule: Schedule, ranks: int, *, cuda: bool
) -> tuple[RunConfig, Layout]:
    """`train_config` of a variant, and its layout, proven to run here.

    Raises:
        UserError: it cannot; where the variant's own settings are what has to go, it says so.
    """
    try:
        cfg = train_config(config, overrides, variant, schedule, cuda=cuda)
        layout = check_config(cfg, ranks)
        check_machine(cfg)
    except UserError as error:
        if not variant.settings:
            raise
        what, _, fix = str(error).rpartition("; ")
        own = [setting.partition("=")[0] for setting in variant.settings]
        if any(name in fix for name in own):
            what, fix = what or fix, f"leave {variant.name} out of --variants, or change it"
        given = " ".join(variant.settings)
        raise UserError(f"--variants: {variant.name} (which sets {given}) cannot run: {what}; {fix}") from error
    return cfg, layout


def precision_remark(config: str, overrides: Sequence[str], cfg: RunConfig) -> str:
    """What to say where `cfg`, made of the first two for a CPU, has another precision than they; else empty."""
    asked = load_config(config, overrides, gpu=False).train.precision
    if asked == cfg.train.precision:
        return ""
    return (
        f"No CUDA device: computed in {cfg.train.precision}, where {config} has train.precision={asked}; "
        f"train.precision={asked} on the command line computes in that."
    )


def same_as(configs: Mapping[TrainVariant, RunConfig], *, cuda: bool) -> dict[TrainVariant, TrainVariant]:
    """Variant -> an earlier one with which it computes the same on this machine; others are left out."""
    found: dict[TrainVariant, TrainVariant] = {}
    seen: dict[tuple[bool, RunConfig], TrainVariant] = {}
    for variant, cfg in configs.items():
        first = seen.setdefault((variant.reported, effective(cfg, cuda=cuda, reported=variant.reported)), variant)
        if first is not variant:
            found[variant] = first
    return found


def effective(cfg: RunConfig, *, cuda: bool, reported: bool) -> RunConfig:
    """`cfg` with what is chosen on this machine, and defaults where a setting has nothing to decide."""
    te_here, triton_here = (cuda and find_spec(name) is not None for name in ("transformer_engine", "triton"))
    parallel, optimizer, model = cfg.parallel, cfg.optimizer, cfg.model
    bf16 = cfg.train.precision == "bf16"
    te = bf16 and te_here and parallel.implementation != "torch"
    triton = triton_here and parallel.kernels != "torch"
    masters = cfg.masters_in_adam and te_here
    parallel = replace(
        parallel,
        implementation="te" if te else "torch",
        kernels="triton" if triton else "torch",
        fused_grad_accumulation=te and parallel.fused_grad_accumulation,
        unique_ids=model.gated and parallel.unique_ids,
    )
    if not model.gated:
        model = replace(model, gate_norm=False)
    logging = replace(cfg.logging, step_times=reported and cfg.logging.step_times)
    by_rows = masters and model.gated and optimizer.deferred_table_updates
    halves = masters and optimizer.store_param_remainders
    optimizer = replace(
        optimizer, fused_master_weights=masters, store_param_remainders=halves, deferred_table_updates=by_rows
    )
    return replace(cfg, parallel=parallel, optimizer=optimizer, model=model, logging=logging)


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

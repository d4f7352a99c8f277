"""Fits a configuration to the number of ranks that there are, without changing what is computed.

The global batch stays; micro-batches may become smaller, and more of them are then accumulated. Tables may lie over
fewer ranks. Tensor, pipeline and context parallelism are never changed: they decide whether the model fits in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.workable import divisors, nearest
from egmla_megatron.errors import UserError

__all__ = ["Fit", "fit_to_nodes"]

MOST_NODES = 4096  # looked at for the nearest number that works


@dataclass(frozen=True)
class Fit:
    """A configuration that works on the ranks, and how it differs from the one that was asked for."""

    cfg: RunConfig
    layout: Layout
    overrides: tuple[str, ...]  # section.key=value, for the trainer
    notes: tuple[str, ...]  # what was changed and why, for people


def fit_to_nodes(cfg: RunConfig, nodes: int, ranks_per_node: int) -> Fit:
    """The configuration nearest to `cfg` that runs on `nodes` x `ranks_per_node` ranks.

    Raises:
        UserError: no such configuration; names the nearest numbers of nodes that have one, or, where none has,
            what is wrong with `cfg` itself.
    """
    ranks = nodes * ranks_per_node
    found = _fit(cfg, ranks)
    if found is not None:
        return found
    usable = _neighbours(cfg, nodes, ranks_per_node)
    if not usable:
        check_config(_smallest(cfg), ranks)  # says what is wrong whatever is adapted
        check_config(cfg, ranks)
        raise AssertionError("a configuration that works was not found")
    allowed = " or ".join(str(count) for count in usable)
    raise UserError(
        f"number of nodes: got {nodes} with {ranks_per_node} ranks each, which the layout cannot use "
        f"({_reason(cfg, ranks)}); allowed next to it: {allowed}; fix: sbatch --nodes={nearest(nodes, usable)}"
    )


def _smallest(cfg: RunConfig) -> RunConfig:
    parallel, train = replace(cfg.parallel, gate_group=1), replace(cfg.train, micro_batch_size=1)
    return replace(cfg, parallel=parallel, train=train)


def _neighbours(cfg: RunConfig, nodes: int, ranks_per_node: int) -> list[int]:
    """The next smaller and the next larger number of nodes that works, up to four times as many."""
    smaller, larger = range(nodes - 1, 0, -1), range(nodes + 1, min(4 * nodes + 8, MOST_NODES))
    found = [next((n for n in some if _fit(cfg, n * ranks_per_node) is not None), None) for some in (smaller, larger)]
    return [count for count in found if count is not None]


def _reason(cfg: RunConfig, ranks: int) -> str:
    parallel, train = cfg.parallel, cfg.train
    unit = parallel.tensor * parallel.pipeline * parallel.context
    if ranks % unit:
        return f"{ranks} ranks are no multiple of tensor x pipeline x context = {unit}"
    return f"train.global_batch_size = {train.global_batch_size} does not divide over {ranks // unit} replicas"


def _fit(cfg: RunConfig, ranks: int) -> Fit | None:
    """None where nothing works."""
    parallel, train = cfg.parallel, cfg.train
    unit = parallel.tensor * parallel.pipeline * parallel.context
    replicas = ranks // unit
    if ranks % unit or train.global_batch_size < 1 or train.global_batch_size % replicas:
        return None
    for micro in _at_most(train.micro_batch_size, train.global_batch_size // replicas):
        for group in _at_most(parallel.gate_group, ranks // parallel.pipeline):
            changed = replace(
                cfg,
                train=replace(train, micro_batch_size=micro),
                parallel=replace(parallel, gate_group=group),
            )
            try:
                layout = check_config(changed, ranks)
            except UserError:
                continue
            return Fit(changed, layout, _overrides(cfg, changed), _notes(cfg, changed, layout))
    return None


def _at_most(wanted: int, whole: int) -> list[int]:
    """Divisors of `whole` up to `wanted`, the largest first."""
    return [size for size in reversed(divisors(whole)) if size <= wanted]


def _overrides(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    pairs = {
        "train.micro_batch_size": (before.train.micro_batch_size, after.train.micro_batch_size),
        "parallel.gate_group": (before.parallel.gate_group, after.parallel.gate_group),
    }
    return tuple(f"{name}={now}" for name, (then, now) in pairs.items() if then != now)


def _notes(before: RunConfig, after: RunConfig, layout: Layout) -> tuple[str, ...]:
    notes = []
    micro, group = after.train.micro_batch_size, after.parallel.gate_group
    if micro != before.train.micro_batch_size:
        notes.append(
            f"train.micro_batch_size {before.train.micro_batch_size} -> {micro}: the global batch stays "
            f"{after.train.global_batch_size} sequences, {layout.num_microbatches} x {micro} on each of {layout.dp} "
            "replicas"
        )
    if group != before.parallel.gate_group and not after.model.gated:
        notes.append(f"parallel.gate_group {before.parallel.gate_group} -> 1: this model has no gating tables")
    elif group != before.parallel.gate_group:
        stage = layout.world_size // layout.pp
        notes.append(
            f"parallel.gate_group {before.parallel.gate_group} -> {group}: the largest below it that divides the "
            f"{stage} ranks of a stage and model.kv_emb_dim = {after.model.kv_emb_dim}; a rank holds "
            f"{after.model.kv_emb_dim // group} columns of each table"
        )
    return tuple(notes)

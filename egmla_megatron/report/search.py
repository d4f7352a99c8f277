"""Layouts of a model on so many GPUs that fit into their memory, ranked by the estimated speed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.schema import Recompute, RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.report.cards import USABLE, Card, Cluster
from egmla_megatron.report.memory import worst_stage
from egmla_megatron.report.rates import Workload
from egmla_megatron.report.step_time import estimate_error, estimate_step, missing_for_estimate

__all__ = ["Found", "search_layouts"]

_MICRO_BATCHES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Found:
    """A layout that fits."""

    settings: dict[str, Any]  # section.key -> value
    layout: Layout
    total_gib: float  # of the worst rank
    tokens_per_second: float | None  # estimated; None: the card or a link is not known well enough
    limited_by: str | None
    error: float | None  # of the estimate, 0 to 1


def search_layouts(cfg: RunConfig, gpus: int, card: Card, cluster: Cluster, *, te: bool, triton: bool) -> list[Found]:
    """All that fit, by estimated tokens per second, the fastest first. UserError where no layout is possible at all.

    Where that is not known: what computes nothing twice, then the least model parallelism, then the largest gate group
    (faster than replicated tables wherever it was measured), then the largest micro-batch, then CUDA graphs.
    """
    found, refused, workable = [], None, False
    for settings, candidate in _candidates(cfg, gpus):
        try:
            layout = check_config(candidate, gpus)
        except UserError as error:
            refused = refused or error
            continue  # does not divide something
        workable = True
        total = worst_stage(candidate, layout, te=te, triton=triton)[1].total / 2**30
        if total > card.memory_gib * USABLE:
            continue
        rate = limit = off = None
        if not missing_for_estimate(candidate, layout, card, cluster):
            step = estimate_step(candidate, layout, card, cluster, te=te, triton=triton)
            rate, limit, off = Workload.of(cfg).tokens / step.step_s, step.limited_by, estimate_error(candidate)
        found.append(Found(settings, layout, total, rate, limit, off))
    if refused is not None and not workable:
        raise refused
    return sorted(found, key=_rank)


def _rank(item: Found) -> tuple[float, ...]:
    layout = item.layout
    again = get_args(Recompute).index(item.settings["train.recompute"])
    by_layout = (again, layout.tp * layout.pp, layout.pp, -layout.gate_group, -item.settings["train.micro_batch_size"])
    return (-(item.tokens_per_second or 0.0), *by_layout, item.settings["train.cuda_graph"] == "false")


def _candidates(cfg: RunConfig, gpus: int) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    sizes = [size for size in (1, 2, 4, 8) if size <= gpus]
    stages = [size for size in (1, 2, 4, 8) if size <= gpus and cfg.model.num_layers % size == 0]
    groups = [size for size in (1, 2, 4, 8) if size <= gpus] if cfg.model.gated else [1]
    choices = itertools.product(get_args(Recompute), sizes, stages, groups, _MICRO_BATCHES, (True, False))
    for again, tp, pp, group, batch, graph in choices:
        if graph and (tp * pp > 1 or again != "none"):
            continue  # refused by check_config, as is much else; these alone would be half of all
        settings = {
            "train.recompute": again,
            "parallel.tensor": tp,
            "parallel.sequence": str(tp > 1).lower(),
            "parallel.pipeline": pp,
            "parallel.gate_group": group,
            "train.micro_batch_size": batch,
            "train.cuda_graph": str(graph).lower(),
        }
        train = replace(cfg.train, recompute=again, micro_batch_size=batch, cuda_graph=graph)
        parallel = replace(cfg.parallel, tensor=tp, sequence=tp > 1, pipeline=pp, gate_group=group)
        yield settings, replace(cfg, train=train, parallel=parallel)

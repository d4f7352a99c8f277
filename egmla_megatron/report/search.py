"""Layouts of a model on so many GPUs that fit into their memory, ranked by the estimated speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.check_switches import graph_obstacles
from egmla_megatron.config.load import overridden
from egmla_megatron.config.schema import Recompute, RunConfig
from egmla_megatron.config.values import as_text
from egmla_megatron.config.workable import divisors, nearest, nearest_multiple, refuse
from egmla_megatron.errors import UserError
from egmla_megatron.report.cards import USABLE, Card, Cluster
from egmla_megatron.report.memory import worst_stage
from egmla_megatron.report.rates import Workload
from egmla_megatron.report.step_time import estimate_error, estimate_step, missing_for_estimate

__all__ = ["SEARCHED", "Found", "Nearest", "Searched", "pinned_settings", "search_layouts"]

SEARCHED = (
    "train.recompute",
    "parallel.tensor",
    "parallel.sequence",
    "parallel.pipeline",
    "parallel.gate_group",
    "train.micro_batch_size",
    "train.cuda_graph",
)
_AUTO = "auto"  # of train.cuda_graph
_SIZES = (1, 2, 4, 8)  # ranks
_MICRO_BATCHES = (16, 12, 8, 6, 4, 3, 2, 1)


@dataclass(frozen=True)
class Found:
    """A layout that fits."""

    settings: dict[str, Any]  # section.key -> value
    layout: Layout
    total_gib: float  # of the worst rank
    tokens_per_second: float | None  # estimated; None: the card or a link is not known well enough
    limited_by: str | None
    error: float | None  # of the estimate, 0 to 1


@dataclass(frozen=True)
class Nearest:
    """The layout that needs least, of those that can run."""

    total_gib: float  # of the worst rank; infinite: none can run
    settings: dict[str, Any]  # section.key -> value

    def short_gib(self, card: Card) -> float:
        """What is missing of a card's memory, of which a part is not for tensors."""
        return self.total_gib - card.memory_gib * USABLE


@dataclass(frozen=True)
class Searched:
    """What a search found, and where it found nothing, what stood in its way."""

    found: list[Found]  # the fastest first
    nearest: Nearest
    without_pin: dict[str, int]  # where nothing fits: pinned setting -> layouts that fit with the other pins alone


def pinned_settings(cfg: RunConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Settings of the search that `overrides` give: section.key -> value; for train.cuda_graph also auto."""
    given = overridden(overrides)
    pins = {}
    for name in SEARCHED:
        if name in given:
            section, key = name.split(".")
            automatic = name == "train.cuda_graph" and str(given[name]).lower() == _AUTO
            pins[name] = _AUTO if automatic else getattr(getattr(cfg, section), key)
    return pins


def search_layouts(
    cfg: RunConfig, gpus: int, card: Card, cluster: Cluster, pins: Mapping[str, Any], *, te: bool, triton: bool
) -> Searched:
    """All that fit, by estimated tokens per second, the fastest first.

    Where that is not known: what computes nothing twice, then the least model parallelism, then the largest gate group
    (faster than replicated tables wherever it was measured), then the largest micro-batch, then CUDA graphs.

    Args:
        pins: section.key -> the only value that is looked at.

    Raises:
        UserError: no layout is possible at all, whatever the memory.
    """
    if gpus < 1:
        refuse("--gpus", gpus, "a whole number from 1", "give the number of GPUs")
    target = _Target(cfg=cfg, gpus=gpus, card=card, cluster=cluster, te=te, triton=triton)
    found, nearest, refusals = target.search(pins)
    if found:
        return Searched(sorted(found, key=_rank), nearest, {})
    others = {name: {key: value for key, value in pins.items() if key != name} for name in pins}
    without = {name: len(target.search(rest)[0]) for name, rest in others.items()}
    if nearest.total_gib == math.inf:
        _refuse_all(cfg, gpus, pins, without, min(refusals)[1])
    return Searched([], nearest, without)


@dataclass(frozen=True, kw_only=True)
class _Target:
    """What is laid over what."""

    cfg: RunConfig
    gpus: int
    card: Card
    cluster: Cluster
    te: bool
    triton: bool

    def search(self, pins: Mapping[str, Any]) -> tuple[list[Found], Nearest, list[tuple[tuple[int, ...], str]]]:
        """(what fits, what needs least of all that can run, refusals with the simplicity of the refused)."""
        found, nearest, refusals = [], Nearest(math.inf, {}), []
        for settings, candidate in _candidates(self.cfg, self.gpus, pins):
            try:
                layout = check_config(candidate, self.gpus)
            except UserError as error:
                refusals.append((_simplicity(candidate), str(error)))
                continue  # does not divide something
            total = worst_stage(candidate, layout, te=self.te, triton=self.triton)[1].total / 2**30
            if total < nearest.total_gib:
                nearest = Nearest(total, settings)
            if total <= self.card.memory_gib * USABLE:
                found.append(Found(settings, layout, total, *self._speed(candidate, layout)))
        return found, nearest, refusals

    def _speed(self, cfg: RunConfig, layout: Layout) -> tuple[float | None, str | None, float | None]:
        """(tokens per second, what limits them, error of the estimate)."""
        if missing_for_estimate(cfg, layout, self.card, self.cluster):
            return None, None, None
        step = estimate_step(cfg, layout, self.card, self.cluster, te=self.te, triton=self.triton)
        return Workload.of(cfg).tokens / step.step_s, step.limited_by, estimate_error(cfg)


def _refuse_all(cfg: RunConfig, gpus: int, pins: Mapping[str, Any], without: dict[str, int], reason: str) -> None:
    """Raises UserError with why no layout can run.

    Args:
        reason: why the simplest one cannot.
    """
    parallel, batch = cfg.parallel, cfg.train.global_batch_size
    if pins:
        given = ", ".join(f"{name}={as_text(value)}" for name, value in pins.items())
        helps = [f"without {name} {count} layouts fit" for name, count in without.items() if count]
        why = reason.partition("; allowed")[0]
        raise UserError(
            f"--search: got {given}, pinned on the command line, with which no layout on {gpus} GPUs can run ({why}); "
            f"allowed: {'; '.join(helps) or 'other values, or none'}; leave a pinned setting out, or change its value"
        )
    models = {tensor * pipeline * parallel.context for tensor in _SIZES for pipeline in _SIZES}
    replicas = {gpus // size for size in models if gpus % size == 0}
    if replicas and all(batch % each for each in replicas):
        refuse(
            "--gpus: every data-parallel rank takes equally many sequences of train.global_batch_size",
            f"{gpus} GPUs for {batch} sequences",
            "a number of GPUs that divides it",
            f"give --gpus {nearest(gpus, divisors(batch))}, or train.global_batch_size={nearest_multiple(batch, gpus)}",
        )
    raise UserError(f"--search: no layout on {gpus} GPUs can run; of the simplest: {reason}")


def _simplicity(cfg: RunConfig) -> tuple[int, ...]:
    """The less of everything, the better its refusal says what is in the way of all."""
    parallel, train = cfg.parallel, cfg.train
    sizes = (parallel.tensor * parallel.pipeline, parallel.gate_group, train.micro_batch_size)
    return (*sizes, get_args(Recompute).index(train.recompute), train.cuda_graph)


def _rank(item: Found) -> tuple[float, ...]:
    layout = item.layout
    again = get_args(Recompute).index(item.settings["train.recompute"])
    by_layout = (again, layout.tp * layout.pp, layout.pp, -layout.gate_group, -item.settings["train.micro_batch_size"])
    return (-(item.tokens_per_second or 0.0), *by_layout, item.settings["train.cuda_graph"] == "false")


def _candidates(cfg: RunConfig, gpus: int, pins: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    sizes = [size for size in _SIZES if size <= gpus]
    choices: dict[str, Sequence[Any]] = {
        "train.recompute": get_args(Recompute),
        "parallel.tensor": sizes,
        "parallel.sequence": (None,),  # with tensor parallelism, unless it is pinned
        "parallel.pipeline": [size for size in sizes if cfg.model.num_layers % size == 0],
        "parallel.gate_group": sizes if cfg.model.gated else [1],
        "train.micro_batch_size": _MICRO_BATCHES,
        "train.cuda_graph": (True, False),
    }
    choices |= {name: (value,) for name, value in pins.items()}
    for again, tp, split, pp, group, batch, asked in itertools.product(*choices.values()):
        sequence = tp > 1 if split is None else split
        parallel = replace(cfg.parallel, tensor=tp, sequence=sequence, pipeline=pp, gate_group=group)
        train = replace(cfg.train, recompute=again, micro_batch_size=batch, cuda_graph=False)
        candidate = replace(cfg, train=train, parallel=parallel)
        graph = not graph_obstacles(candidate) if asked == _AUTO else asked
        if graph and "train.cuda_graph" not in pins and (tp * pp > 1 or again != "none"):
            continue  # refused by check_config, as is much else; these alone would be half of all
        values = (again, tp, sequence, pp, group, batch, graph)
        settings = dict(zip(SEARCHED, map(_plain, values), strict=True))
        yield settings, replace(candidate, train=replace(train, cuda_graph=graph))


def _plain(value: Any) -> Any:
    """As an override writes it, numbers as numbers."""
    return as_text(value) if isinstance(value, bool) else value

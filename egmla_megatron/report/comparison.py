"""Several runs beside each other: seeds of one configuration together, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from egmla_megatron.config.load import to_dict
from egmla_megatron.model.count import count_parameters, kv_cache_elements_per_token
from egmla_megatron.report.read import RunMetrics
from egmla_megatron.report.summary import Summary, finite, spread, summarize
from egmla_megatron.report.tables import NONE, markdown

__all__ = ["Group", "comparison", "group_seeds"]

_OWN = ("name", "dir", "seed")  # of the section run: what may differ between seeds of one configuration


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed, at the same step and on the same devices; or one run."""

    key: str  # what the runs have in common
    runs: list[RunMetrics]
    summaries: list[Summary]

    @property
    def name(self) -> str:
        """Labels of the runs."""
        return ", ".join(metrics.name for metrics in self.runs)

    @property
    def seeds(self) -> list[int]:
        """Of the runs."""
        return [metrics.config.run.seed for metrics in self.runs]

    def over_seeds(self, value: Callable[[Summary], float | None], form: str) -> str:
        """Mean and, of several runs, the lowest and the highest."""
        found = [each for each in map(value, self.summaries) if each is not None]
        if not found:
            return NONE
        mean = f"{statistics.fmean(found):{form}}"
        return mean if len(found) == 1 else f"{mean} ({min(found):{form}} to {max(found):{form}})"


def group_seeds(runs: Sequence[RunMetrics]) -> list[Group]:
    """Groups in the order of their first runs. The same seed again is another group: the code may have changed."""
    groups: list[Group] = []
    for metrics in runs:
        summary = summarize(metrics)
        key, seed = _key(metrics, summary), metrics.config.run.seed
        group = next((each for each in groups if each.key == key and seed not in each.seeds), None)
        if group is None:
            group = Group(key, [], [])
            groups.append(group)
        group.runs.append(metrics)
        group.summaries.append(summary)
    return groups


def _key(metrics: RunMetrics, summary: Summary) -> str:
    config: dict[str, Any] = to_dict(metrics.config)
    config["run"] = {name: value for name, value in config["run"].items() if name not in _OWN}
    return str((config, summary.steps, _devices(metrics)))


def _devices(metrics: RunMetrics) -> str:
    start = metrics.starts[-1] if metrics.starts else {}
    return f"{start.get('device', NONE)} x {start.get('world_size', NONE)}"


def comparison(runs: Sequence[RunMetrics]) -> str:
    """One row per group in each of two tables, narrow enough for paper: what was trained, and how fast."""
    groups = group_seeds(runs)
    seeds = any(len(group.runs) > 1 for group in groups)
    losses = [_losses(group, seeds=seeds) for group in groups]
    head = ["run", *(["runs"] if seeds else []), "active (M)", "tables (M)", "cache/token", "steps", "tokens"]
    rates = ["run", "device x ranks", "tokens/s", "first quartile", "third quartile", "n", "MFU", "peak memory (MiB)"]
    text = f"{markdown([*head, 'train loss', 'val loss'], losses)}\n\n{markdown(rates, list(map(_speeds, groups)))}"
    if not seeds:
        return text
    said = "; ".join(f"{group.name}: {', '.join(map(str, group.seeds))}" for group in groups)
    return f"{text}\n\nRuns that differ in nothing but their seed are one row: mean (lowest to highest). Seeds: {said}."


def _losses(group: Group, *, seeds: bool) -> list[str]:
    model, summary = group.runs[0].config.model, group.summaries[0]
    count = count_parameters(model)
    return [
        group.name,
        *([str(len(group.runs))] if seeds else []),
        f"{count.active / 1e6:,.1f}",
        f"{count.gate_tables / 1e6:,.1f}",
        f"{kv_cache_elements_per_token(model):,d}",
        f"{summary.steps:,d}",
        f"{summary.tokens:,d}",
        group.over_seeds(lambda each: each.mean_last_loss, ".4f"),
        group.over_seeds(lambda each: each.val_loss, ".4f"),
    ]


def _speeds(group: Group) -> list[str]:
    """Quartiles and n are those of the steps, of all runs of the group together."""
    steps = spread([rate for run in group.runs for rate in finite(run.steady_steps(), "tokens_per_second")])
    return [
        group.name,
        _devices(group.runs[0]),
        group.over_seeds(lambda each: each.tokens_per_second.median if each.tokens_per_second else None, ",.0f"),
        *([f"{each:,.0f}" for each in (steps.low, steps.high, steps.n)] if steps else [NONE] * 3),
        group.over_seeds(lambda each: each.mfu.median if each.mfu else None, ".1%"),
        group.over_seeds(lambda each: each.peak_memory_mib, ",.0f"),
    ]

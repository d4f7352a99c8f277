"""`tools/bench_train.py` on every rank: variants one after another in one job, rows on rank 0."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from egmla_megatron.bench.batches import open_dataset
from egmla_megatron.bench.measure import Measurement, measure
from egmla_megatron.bench.record import commit, hardware, software
from egmla_megatron.bench.rows import percentile, slowest
from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.bench.train_variants import TrainVariant
from egmla_megatron.config.check import Layout
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.folders import write_result
from egmla_megatron.model.spec import choose_implementation, choose_kernels
from egmla_megatron.parallel.agreement import agree_on
from egmla_megatron.parallel.world import World, close_world, form_groups, open_world, use_capturable_stream
from egmla_megatron.report.memory import worst_stage
from egmla_megatron.report.rates import Workload
from egmla_megatron.report.tables import markdown
from egmla_megatron.train.metrics import dense_peak_flops
from egmla_megatron.train.sinks import Sinks, open_sinks

__all__ = ["TrainBench", "run_train_bench"]

# megatron-core sets them for a process and refuses a second model that wants others
_TE_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@dataclass(frozen=True)
class TrainBench:
    """What runs."""

    configs: dict[TrainVariant, RunConfig]  # the first is what the others are compared with
    layouts: dict[TrainVariant, Layout]
    same_as: dict[TrainVariant, TrainVariant]  # variant -> an earlier one that computes the same on this machine
    schedule: Schedule
    rounds: int
    remark: str  # for the reader, may be empty
    json: Path | None


_Found = dict[TrainVariant, list[list[Measurement]]]  # of every round, of every rank


def run_train_bench(bench: TrainBench, command: Sequence[str]) -> int:
    """Measure on all ranks that the launcher started; rank 0 prints a table and writes. Returns the exit code.

    The file grows with every variant, and what was measured before one fails, for want of memory say, is printed.
    """
    first = next(iter(bench.configs))
    world = open_world(bench.configs[first], bench.layouts[first])
    asked = {"variants": str(list(bench.configs)), "rounds": bench.rounds, "schedule": str(bench.schedule)}
    agree_on(world.store, world.rank, world.size, "command line", asked, "start every rank with the same one")
    found: _Found = {variant: [] for variant in bench.configs}
    order = list(bench.configs)
    try:
        for number in range(bench.rounds):
            for variant in order[:: -1 if number % 2 else 1]:  # back and forth, so that drift hurts all alike
                world = _world(bench, variant, world)
                found[variant].append(_measure_everywhere(bench, variant, world))
                if world.is_first and bench.json is not None:
                    write_result("--json", bench.json, _as_json(bench, found, world, command))
    finally:
        if world.is_first and any(found.values()):
            print(_as_text(bench, found, world), flush=True)
    dist.barrier(group=world.control)
    close_world()
    return 0


def _as_json(bench: TrainBench, found: _Found, world: World, command: Sequence[str]) -> str:
    result = {
        "hardware": hardware(world.device),
        "software": software(),
        "commit": commit(),
        "command": " ".join(command),
        "unfinished": _unfinished(bench, found),
        "rows": _rows(bench, found, world),
    }
    return json.dumps(result, indent=1) + "\n"


def _as_text(bench: TrainBench, found: _Found, world: World) -> str:
    unfinished = _unfinished(bench, found)
    missing = [f"Not measured in all {bench.rounds} rounds: {', '.join(unfinished)}."] if unfinished else []
    return "\n\n".join([_table(_rows(bench, found, world)), *missing, *_remarks(bench)])


def _unfinished(bench: TrainBench, found: _Found) -> list[str]:
    return [variant.name for variant, rounds in found.items() if len(rounds) < bench.rounds]


def _rows(bench: TrainBench, found: _Found, world: World) -> list[dict[str, Any]]:
    """Of the variants that were measured at all."""
    rows = [_row(bench, variant, rounds, world) for variant, rounds in found.items() if rounds]
    for row in rows:
        row["speed_to_first"] = _digits(row["tokens_per_second"] / rows[0]["tokens_per_second"])
    return rows


def _world(bench: TrainBench, variant: TrainVariant, world: World) -> World:
    for name in _TE_ATTENTION:
        os.environ.pop(name, None)
    layout = bench.layouts[variant]
    use_capturable_stream(bench.configs[variant], world.device)
    if layout == world.layout:
        return world
    return form_groups(bench.configs[variant], layout, world.local_rank, world.device, world.store)


def _measure_everywhere(bench: TrainBench, variant: TrainVariant, world: World) -> list[Measurement]:
    cfg = bench.configs[variant]
    dataset = open_dataset(cfg, bench.schedule.total)
    with _sinks(cfg, world) if variant.reported else nullcontext() as sinks:
        mine = measure(cfg, world, dataset, bench.schedule, sinks)
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.control)
    if world.is_first:
        (times,) = slowest([everyone])
        print(f"{variant.name}: {statistics.median(times):.1f} ms a step", file=sys.stderr, flush=True)
    return everyone


@contextmanager
def _sinks(cfg: RunConfig, world: World) -> Iterator[Sinks]:
    """Those of the run, in a folder that is gone afterwards; the console's lines go to stderr."""
    with tempfile.TemporaryDirectory(prefix="egmla-bench-train-") as folder, redirect_stdout(sys.stderr):
        sinks = open_sinks(replace(cfg, run=replace(cfg.run, dir=folder)), is_first=world.is_first)
        try:
            yield sinks
        finally:
            sinks.close()


def _row(bench: TrainBench, variant: TrainVariant, rounds: list[list[Measurement]], world: World) -> dict[str, Any]:
    cfg, layout = bench.configs[variant], bench.layouts[variant]
    times = [ms for each in slowest(rounds) for ms in each]
    median = statistics.median(times)
    rates = Workload.of(cfg).rates(median / 1e3, layout.world_size, dense_peak_flops(world.device))
    te = choose_implementation(cfg.parallel.implementation) == "te"
    planned = worst_stage(cfg, layout, te=te, triton=choose_kernels(cfg.parallel.kernels) == "triton")[1].total
    cuda = world.device.type == "cuda"
    last = rounds[-1][-1]
    return {
        "variant": variant.name,
        "settings": list(variant.settings),
        "same_as": bench.same_as[variant].name if variant in bench.same_as else None,
        "reported": variant.reported,
        "ranks": layout.world_size,
        "step_ms_median": round(median, 3),
        "step_ms_p10": round(percentile(times, 0.1), 3),
        "step_ms_p90": round(percentile(times, 0.9), 3),
        "n": len(times),
        "tokens_per_second": _digits(rates.tokens_per_second),
        "tflops_per_second_per_rank": _digits(rates.tflops_per_second_per_rank),
        "mfu": None if rates.mfu is None else _digits(rates.mfu),
        "peak_mib": max(rank.peak_mib or 0.0 for ranks in rounds for rank in ranks) if cuda else None,
        "peak_rss_mib": max(rank.peak_rss_mib or 0.0 for ranks in rounds for rank in ranks) or None,
        "predicted_mib": planned / 2**20 if cuda else None,
        "loss_first": last.losses[0],
        "loss_last": last.losses[-1],
    }


def _remarks(bench: TrainBench) -> list[str]:
    """What the numbers do not show, for a person to read."""
    remarks = []
    for variant, earlier in bench.same_as.items():
        given = f" ({' '.join(variant.settings)})" if variant.settings else ""
        remarks.append(f"{variant.name}{given} changes nothing here: it computes what {earlier.name} does.")
    return [*remarks, bench.remark] if bench.remark else remarks


def _digits(value: float) -> float:
    """Six of them: a small model on a busy machine has small rates."""
    return float(f"{value:.6g}")


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["variant", "ms a step (p10 to p90)", "n", "tokens/s", f"x {rows[0]['variant']}", "TFLOP/s a rank", "MFU"]
    on_gpus = rows[0]["peak_mib"] is not None
    # a process goes on holding what variants before took, so that a CPU's has no prediction
    head += ["peak MiB", "predicted"] if on_gpus else ["resident MiB"]
    head += ["loss first, last"]
    lines = []
    for row in rows:
        lines.append(
            [
                row["variant"],
                f"{row['step_ms_median']:.1f} ({row['step_ms_p10']:.1f} to {row['step_ms_p90']:.1f})",
                str(row["n"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{row['speed_to_first']:.3f}",
                f"{row['tflops_per_second_per_rank']:.2f}",
                "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
                *(_memory(row) if on_gpus else [_resident(row)]),
                f"{row['loss_first']:.4f}, {row['loss_last']:.4f}",
            ]
        )
    return markdown(head, lines)


def _memory(row: dict[str, Any]) -> list[str]:
    return [f"{row['peak_mib']:,.0f}", f"{row['predicted_mib'] / row['peak_mib'] - 1:+.1%}"]


def _resident(row: dict[str, Any]) -> str:
    return "-" if row["peak_rss_mib"] is None else f"{row['peak_rss_mib']:,.0f}"

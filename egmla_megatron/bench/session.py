"""The benchmark on every rank: link, variants one after another, result on rank 0."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from egmla_megatron.bench.batches import Rows, open_dataset, rows_of_step
from egmla_megatron.bench.link import LinkSpeed, measure_link
from egmla_megatron.bench.measure import Measurement, measure
from egmla_megatron.bench.options import BenchOptions
from egmla_megatron.bench.plan import BenchPlan
from egmla_megatron.bench.plot import draw
from egmla_megatron.bench.predict import exchanged_rows, predict_traffic
from egmla_megatron.bench.record import commit, hardware, software
from egmla_megatron.bench.rows import Facts, make_row
from egmla_megatron.bench.table import markdown
from egmla_megatron.bench.variants import Variant
from egmla_megatron.config.load import to_dict
from egmla_megatron.errors import UserError
from egmla_megatron.parallel.agreement import agree_on
from egmla_megatron.parallel.world import World, close_world, form_groups, open_world, use_capturable_stream

__all__ = ["run_ranks"]


def _say(world: World, text: str) -> None:
    if world.is_first:
        print(text, file=sys.stderr, flush=True)


def _asked(options: BenchOptions) -> dict[str, Any]:
    """What all ranks must have been asked for alike: a rank with other variants or rounds would wait for ever."""
    outputs = ("json", "markdown", "plot")
    return {name: str(value) for name, value in vars(options).items() if name not in outputs}


def _measure_variant(plan: BenchPlan, variant: Variant, world: World, dataset: Any) -> list[Measurement]:
    """Of every rank, on every rank."""
    try:
        mine = measure(plan.configs[variant], world, dataset, plan.schedule)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"memory: {variant.name} ran out of GPU memory on rank {world.rank} ({str(error).splitlines()[0][:120]}); "
            "lower --sequences, or leave it out by --variants"
        ) from error
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.control)
    return everyone


def _measure_all(plan: BenchPlan, world: World, dataset: Any) -> tuple[World, dict[Variant, list[list[Measurement]]]]:
    """(the last world, per variant and round what every rank found)."""
    options = plan.options
    found: dict[Variant, list[list[Measurement]]] = {variant: [] for variant in options.variants}
    for number in range(options.rounds):
        # back and forth: a machine that slowly warms up or gets busier hurts all variants alike
        for variant in options.variants[:: -1 if number % 2 else 1]:
            cfg, layout = plan.configs[variant], plan.layouts[variant]
            if layout != world.layout:
                use_capturable_stream(cfg, world.device)
                world = form_groups(cfg, layout, world.local_rank, world.device, world.store)
            measured = _measure_variant(plan, variant, world, dataset)
            found[variant].append(measured)
            times = [max(step) for step in zip(*(rank.step_ms for rank in measured), strict=True)]
            _say(world, f"{variant.name}: {median(times):.1f} ms a step, loss {measured[0].losses[-1]:.4f}")
    return world, found


def _row(plan: BenchPlan, variant: Variant, rounds: list[list[Measurement]], rows: Rows, link: float) -> dict[str, Any]:
    cfg, ranks = plan.configs[variant], plan.ranks
    received = exchanged_rows(cfg, tokens=rows.tokens, own=rows.own, union=rows.union) if variant.sharded else 0
    facts = Facts(
        variant=variant,
        ranks=ranks,
        tokens_per_step=cfg.train.global_batch_size * cfg.train.seq_length,
        link_gb_per_s=link,
        predicted=predict_traffic(cfg, ranks, received),
        exchanged_rows=received,
        unique_fraction=rows.unique_fraction,
    )
    return make_row(facts, rounds)


def _settings(options: BenchOptions, plan: BenchPlan, rows: Rows) -> dict[str, Any]:
    cfg = plan.base
    return {
        "ranks": plan.ranks,
        "tokens_per_rank": rows.tokens,
        "unique_fraction": rows.unique_fraction,
        "precision": cfg.train.precision,
        "gradients": cfg.parallel.grad_reduce_dtype,
        "overlap": cfg.parallel.overlap_grad_reduce,
        "distributed_optimizer": cfg.optimizer.distributed,
        "implementation": cfg.parallel.implementation,
        "data": ", ".join(cfg.data.train) or "synthetic: Zipf-Mandelbrot fitted to English",
        "slow_link": options.slow_link,
        "nodes_on_this_machine": options.nodes or None,
        "link_cap": options.link if options.nodes else None,
        "steps": options.steps,
        "warmup": options.warmup,
        "rounds": options.rounds,
        "config": to_dict(cfg),
    }


def _write(options: BenchOptions, result: dict[str, Any]) -> None:
    """Every output, whatever becomes of the others: the measurement took long.

    Raises:
        UserError: a file could not be written.
    """
    writers: list[tuple[Path | None, Callable[[Path], object]]] = [
        (options.json, lambda path: path.write_text(json.dumps(result, indent=1) + "\n")),
        (options.markdown, lambda path: path.write_text(markdown(result))),
        (options.plot, lambda path: draw(result, path)),
    ]
    problems = []
    for path, write in writers:
        try:
            if path is not None:
                write(path)
        except OSError as error:
            problems.append(f"{path} ({error.strerror or error})")
    print(markdown(result), flush=True)
    if problems:
        raise UserError(f"output: could not write {', '.join(problems)}; the table is on stdout; free space and repeat")


def run_ranks(plan: BenchPlan, command: Sequence[str]) -> int:
    """Measure on all ranks that the launcher started; rank 0 writes. Returns the exit code.

    Args:
        command: as typed, for the record.
    """
    options = plan.options
    first = options.variants[0]
    world = open_world(plan.configs[first], plan.layouts[first])
    agree_on(world.store, world.rank, world.size, "command line", _asked(options), "start every rank with the same one")
    dataset = open_dataset(plan.base, plan.schedule.total)
    rows = rows_of_step(plan.base, dataset, plan.ranks, plan.schedule.counted_step)
    _say(world, f"{rows.tokens} tokens a rank and step, {rows.unique_fraction:.1%} of them distinct ids")
    link = measure_link(world) if world.size > 1 else LinkSpeed(0.0, 0, 0)
    _say(world, f"link: {link.gb_per_s:.3f} GB/s, bus bandwidth of an all-reduce of {link.payload_mib} MiB")
    world, found = _measure_all(plan, world, dataset)
    if world.is_first:
        made = [_row(plan, variant, rounds, rows, link.gb_per_s) for variant, rounds in found.items()]
        result = {
            "hardware": hardware(world.device),
            "software": software(),
            "commit": commit(),
            "command": " ".join(command),
            "settings": _settings(options, plan, rows),
            "link": asdict(link),
            "rows": made,
        }
        _write(options, result)
    dist.barrier(group=world.control)  # rank 0 holds the store: nobody leaves before it is done
    close_world()
    return 0

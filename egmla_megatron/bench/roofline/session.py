"""`tools/bench_kernels.py`: every kernel of a training step timed alone, on one device."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from egmla_megatron.bench.record import commit, hardware, software
from egmla_megatron.bench.roofline.case import Buffers, Case
from egmla_megatron.bench.roofline.cost import Machine
from egmla_megatron.bench.roofline.gate_cases import gate_cases, heads_cases
from egmla_megatron.bench.roofline.layer_cases import layer_cases
from egmla_megatron.bench.roofline.linear_cases import linear_cases
from egmla_megatron.bench.roofline.options import KernelBench
from egmla_megatron.bench.roofline.rates import measure_machine
from egmla_megatron.bench.roofline.sizes import Sizes, sizes_of
from egmla_megatron.bench.roofline.table import Row, kernel_table, make_row, sum_of_rows
from egmla_megatron.bench.roofline.timing import GraphTimer, HostTimer, Timer
from egmla_megatron.bench.roofline.update_case import update_cases
from egmla_megatron.config.to_mcore import DTYPES
from egmla_megatron.folders import write_result
from egmla_megatron.model.build import BuiltModel, build_model
from egmla_megatron.parallel.world import World, close_world, open_world, seed_everything

__all__ = ["all_cases", "build_one_layer", "run_kernel_bench", "sizes_of_built"]


def run_kernel_bench(bench: KernelBench, command: Sequence[str]) -> int:
    """Time, print the table, write the JSON file. Returns the exit code."""
    result = _measure(bench, open_world(bench.cfg, bench.layout), command)
    close_world()  # not after an error: a graph that still holds a communicator would keep it from being told
    print(kernel_table(result), flush=True)
    if bench.json is not None:
        write_result("--json", bench.json, json.dumps(result, indent=1) + "\n")
    return 0


def _measure(bench: KernelBench, world: World, command: Sequence[str]) -> dict[str, Any]:
    cfg, device = bench.cfg, world.device
    if device.type == "cuda":  # autograd works on the stream of the forward pass, which a capture must own
        torch.cuda.set_stream(torch.cuda.Stream(device))
    seed_everything(cfg.run.seed, world)
    machine = measure_machine(device, DTYPES[cfg.train.precision])
    built = build_one_layer(bench, world)
    sizes = sizes_of_built(bench, built)
    timer: Timer = HostTimer(bench.repeats)
    if device.type == "cuda":
        timer = GraphTimer(bench.repeats, machine, device)
    rows = [_row(case, timer, machine) for case in all_cases(bench, sizes, built, device)]
    return {
        "hardware": hardware(device),
        "software": software(),
        "commit": commit(),
        "command": " ".join(command),
        "settings": _settings(bench, sizes, built),
        "remarks": list(bench.remarks),
        "machine": {
            "copy_tb_per_s": machine.bytes_per_s / 1e12,
            "product_tflops_per_s": machine.flops_per_s / 1e12,
        },
        "rows": rows,
        "sum": sum_of_rows(rows),
    }


def build_one_layer(bench: KernelBench, world: World) -> BuiltModel:
    """The model cut down to its first layer, whose modules are those of every layer."""
    cfg = bench.cfg
    return build_model(replace(cfg, model=replace(cfg.model, num_layers=1)), world)


def sizes_of_built(bench: KernelBench, built: BuiltModel) -> Sizes:
    """Sizes of the micro-batch in the whole model."""
    in_layers = built.implementation == "te" and built.config.fused_grad_accumulation
    return sizes_of(bench.cfg, bench.distinct_fraction, gradients_in_layers=in_layers)


def all_cases(bench: KernelBench, sizes: Sizes, built: BuiltModel, device: torch.device) -> list[Case]:
    """Every row of the table, in order."""
    buffers, triton = Buffers(device, DTYPES[bench.cfg.train.precision]), built.kernels == "triton"
    return [
        *linear_cases(sizes, built.implementation, buffers),
        *layer_cases(sizes, built, buffers),
        *gate_cases(sizes, triton=triton, buffers=buffers),
        *heads_cases(sizes, triton=triton, buffers=buffers),
        *update_cases(bench.cfg, bench.layout.num_microbatches, sizes.distinct, buffers),
    ]


def _row(case: Case, timer: Timer, machine: Machine) -> Row:
    row = make_row(case, timer(case), machine)
    print(f"{case.title}: {row['us_median']:,.1f} us", file=sys.stderr, flush=True)
    return row


def _settings(bench: KernelBench, sizes: Sizes, built: BuiltModel) -> dict[str, Any]:
    return {
        "model": sizes.model.name,
        "layers": sizes.model.num_layers,
        "sequences": sizes.sequences,
        "length": sizes.length,
        "distinct_ids": sizes.distinct,
        "gate_rows": sizes.rows,
        "micro_batches_of_a_step": bench.layout.num_microbatches,
        "precision": bench.cfg.train.precision,
        "implementation": built.implementation,
        "attention_backend": built.attention_backend,
        "kernels": built.kernels,
        "repeats": bench.repeats,
    }

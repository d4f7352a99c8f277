"""The command line of `tools/bench_sharding.py`, and the configuration that it means."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from egmla_megatron.bench.rate import bits_per_second
from egmla_megatron.bench.schedule import MOST_ROUNDS, MOST_STEPS
from egmla_megatron.bench.variants import VARIANTS, Variant, chosen
from egmla_megatron.cli import CommandParser, check_count
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.folders import refuse_unwritable_file

__all__ = ["BenchOptions", "base_config", "parse_options"]

_PLOTS = (".png", ".svg")
_OWN_SWITCHES = ("parallel.gate_group", "parallel.gate_exchange", "parallel.gate_granularity", "parallel.unique_ids")
_AUTO_MODELS = {False: "eg_mla_base_kv64", True: "bench_nodes"}  # by: nodes on this machine
_AUTO_SIZES = {False: (8, 20, 5), True: (2, 8, 2)}  # likewise: sequences, measured steps, warm-up steps


@dataclass(frozen=True)
class BenchOptions:
    """What was asked for."""

    config: str  # YAML file or name
    overrides: tuple[str, ...]  # section.key=value
    variants: tuple[Variant, ...]
    sequences: int  # micro-batch of a rank
    steps: int  # measured steps of a variant and round
    warmup: int  # steps before them
    rounds: int  # times that every variant is built and measured
    gradients: Literal["fp32", "bf16"]
    overlap: bool  # of gradient reduction with backward, and of gathering sharded weights with forward
    distributed_optimizer: bool
    implementation: str  # auto, te, torch
    slow_link: bool
    data: str  # prefix of an indexed data set; empty: synthetic ids
    seed: int
    nodes: int  # network namespaces on this machine, 0: the ranks that the launcher started
    link: str  # rate of a node's link, as tc writes it; only with nodes
    json: Path | None
    markdown: Path | None
    plot: Path | None


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="bench_sharding",
        description="Replicated against dimension-wise sharded gating tables, on the same ranks.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="variants: " + "\n          ".join(VARIANTS),
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="section.key=value", help="settings common to all variants")
    add("--config", help="model or run configuration (eg_mla_base_kv64; with --nodes-on-this-machine bench_nodes)")
    add("--variants", default="all", help="comma-separated names (all)")
    add("--sequences", type=int, help="sequences of a rank's micro-batch (8; nodes: 2)")
    add("--steps", type=int, help="measured steps (20; nodes: 8)")
    add("--warmup", type=int, help="steps before them (5; nodes: 2)")
    add("--rounds", type=int, default=1, help="times that all variants run, every other time in reverse order (1)")
    add("--gradients", choices=("fp32", "bf16"), default="fp32", help="type in which gradients are reduced (fp32)")
    boolean = argparse.BooleanOptionalAction
    add("--overlap", action=boolean, default=True, help="of backward with gradients, forward with weights (on)")
    add("--distributed-optimizer", action=boolean, default=False, help="shard optimizer states over all ranks (off)")
    add("--implementation", choices=("auto", "te", "torch"), default="auto", help="who computes the layers (auto)")
    add("--slow-link", action="store_true", help="NCCL through sockets only: one GPU of this machine plays one node")
    add("--data", default="", metavar="PREFIX", help="indexed data set to train on (synthetic ids)")
    add("--seed", type=int, default=1234, help="of the weights and synthetic ids (1234)")
    add("--nodes-on-this-machine", type=int, default=0, metavar="N", help="N CPU ranks, each in a network of its own")
    add("--link", metavar="RATE", help="cap of a node's link in both directions, like 400mbit (the default)")
    for name, what in (("json", "results"), ("markdown", "table"), ("plot", "figure, .png or .svg")):
        add(f"--{name}", type=Path, metavar="FILE", help=f"write the {what} there")
    return parser


def _refuse(option: str, got: object, allowed: str, fix: str) -> None:
    raise UserError(f"{option}: got {got}, allowed {allowed}; {fix}")


def _check(given: argparse.Namespace) -> None:
    most = {"sequences": 65_536, "steps": MOST_STEPS, "warmup": MOST_STEPS, "rounds": MOST_ROUNDS}
    for name, largest in most.items():
        check_count(f"--{name}", getattr(given, name), 1, largest)
    check_count("--seed", given.seed, 0, 2**32 - 1)
    if given.nodes_on_this_machine and not 2 <= given.nodes_on_this_machine <= 64:
        _refuse("--nodes-on-this-machine", given.nodes_on_this_machine, "2 to 64", "give 2 or 4")
    if given.link is not None:
        if not given.nodes_on_this_machine:
            _refuse("--link", given.link, "only with --nodes-on-this-machine", "add that, or leave --link out")
        bits_per_second(given.link)
    if given.slow_link and given.nodes_on_this_machine:
        _refuse("--slow-link", "it with --nodes-on-this-machine", "one of the two", "leave one out")
    if given.plot and given.plot.suffix.lower() not in _PLOTS:
        _refuse("--plot", given.plot, "a name that ends in .png or .svg", "give it such a name")
    for path in filter(None, (given.json, given.markdown, given.plot)):
        refuse_unwritable_file("output", path)
    if "," in given.data:
        _refuse("--data", given.data, "the prefix of one data set", "leave out the comma and what follows it")
    for override in given.overrides:
        key = override.partition("=")[0]
        if key in _OWN_SWITCHES:
            _refuse("command line", key, "settings that no variant sets itself", "choose by --variants")


def parse_options(arguments: Sequence[str]) -> BenchOptions:
    """Reads the command line.

    Raises:
        UserError: it cannot be meant so.
    """
    given = _parser().parse_intermixed_args(list(arguments))
    _check(given)
    local = bool(given.nodes_on_this_machine)
    sequences, steps, warmup = _AUTO_SIZES[local]
    return BenchOptions(
        config=given.config or _AUTO_MODELS[local],
        overrides=tuple(given.overrides),
        variants=chosen(given.variants),
        sequences=given.sequences or sequences,
        steps=given.steps or steps,
        warmup=given.warmup or warmup,
        rounds=given.rounds,
        gradients=given.gradients,
        overlap=given.overlap,
        distributed_optimizer=given.distributed_optimizer,
        implementation=given.implementation,
        slow_link=given.slow_link,
        data=given.data,
        seed=given.seed,
        nodes=given.nodes_on_this_machine,
        link=given.link or "400mbit",
        json=given.json,
        markdown=given.markdown,
        plot=given.plot,
    )


def base_config(options: BenchOptions, ranks: int, *, cuda: bool, steps: int) -> RunConfig:
    """The configuration that all variants share: one micro-batch a step on `ranks` data-parallel ranks, no CUDA graph
    unless an override asks for one, whatever --config says.

    Args:
        steps: training steps of one variant.

    Raises:
        UserError: the configuration has no tables, or lays the model itself over the ranks.
    """
    model = load_config(options.config, options.overrides, gpu=cuda)
    settings = {
        "run.seed": options.seed,
        "data.train": f"[{options.data}]",
        "data.valid": "[]",
        "data.cache_dir": Path(tempfile.gettempdir(), f"egmla-bench-{os.getuid()}"),
        "train.seq_length": min(model.train.seq_length, model.model.max_position_embeddings),
        "train.micro_batch_size": options.sequences,
        "train.global_batch_size": options.sequences * ranks,
        "train.steps": steps,
        "train.cuda_graph": False,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.distributed": options.distributed_optimizer,
        "parallel.overlap_grad_reduce": options.overlap,
        "parallel.overlap_param_gather": options.overlap and options.distributed_optimizer,
        "parallel.grad_reduce_dtype": options.gradients,
        "parallel.implementation": options.implementation,
        "parallel.gate_group": 1,
    }
    if not cuda:  # bf16 is slow there, and loader processes would take the cores of the ranks
        settings |= {"train.precision": "fp32", "data.num_workers": 0}
    own = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
    cfg = load_config(options.config, [*own, *options.overrides], gpu=cuda)
    if not cfg.model.gated:
        _refuse("--config", options.config, "a model with gating tables", "choose an eg_mla model")
    sizes = (cfg.parallel.tensor, cfg.parallel.pipeline, cfg.parallel.context)
    if math.prod(sizes) != 1:
        what = "parallel.tensor, parallel.pipeline, parallel.context"
        _refuse(what, sizes, "1: all ranks are data-parallel here", "leave them out")
    return replace(cfg, optimizer=replace(cfg.optimizer, decay_steps=0))

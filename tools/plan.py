"""Prints what a configuration costs before anything is built: parameters, cache, operations, memory, bytes, time.

    python tools/plan.py CONFIG [section.key=value ...] [--gpus N] [--gpu h100] [--search] [--json]
    python tools/plan.py --compare CONFIG CONFIG [section.key=value ...] [--gpus N] [--gpu h100] [--json]

CONFIG is a YAML file or a bare name from configs/run or configs/model. Exit code 1 where a search finds no layout that
fits, 2 on a user's mistake.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, check_count, run_main
from egmla_megatron.errors import UserError
from egmla_megatron.report.cards import CARDS, MOST_GPUS, find_card, find_cluster
from egmla_megatron.report.plan import Hardware, check_price, make_comparison, make_plan, make_search
from egmla_megatron.report.show_plan import format_comparison, format_plan, format_search

NOTHING_FITS = 1  # exit code


def _parser() -> CommandParser:
    parser = CommandParser(
        description="Cost of a configuration: parameters, cache, operations, memory, bytes, time.",
        usage="plan.py CONFIG [section.key=value ...] [options]\n"
        "       plan.py --compare CONFIG CONFIG [section.key=value ...] [options]",
    )
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="CONFIG [section.key=value ...]",
        help="a YAML file or a name from configs/; settings",
    )
    add("--compare", nargs=2, metavar="CONFIG", help="two configurations side by side, instead of CONFIG")
    add("--gpus", "--world-size", type=int, metavar="N", help="ranks: their layout, the memory of each, what it sends")
    add(
        "--gpu",
        metavar="NAME",
        help=f"fits? how fast? {', '.join(CARDS)}, or any name with the two options that follow",
    )
    add("--gpu-memory-gib", type=float, metavar="GIB", help="memory of one GPU")
    add("--gpu-tflops", type=float, metavar="TFLOPS", help="dense bf16 peak of one GPU")
    add("--gpu-memory-gb-per-s", type=float, metavar="GB/S", help="peak bandwidth of its memory")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs that share fast links (8)")
    add("--nvlink-gb-per-s", type=float, metavar="GB/S", help="that a GPU sends to others of its node in an all-reduce")
    add("--link-gb-per-s", type=float, metavar="GB/S", help="that a node sends to others, all its GPUs together")
    add("--gpu-hour-price", type=float, metavar="X", help="of one GPU for an hour: the cost of the run")
    add("--search", action="store_true", help="layouts on --gpus N that fit into --gpu, best first")
    add("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def _hardware(given: argparse.Namespace) -> Hardware | None:
    check_price(given.gpu_hour_price)
    check_count("--gpus", given.gpus, 1, MOST_GPUS)
    of_card = ("gpu_memory_gib", "gpu_tflops", "gpu_memory_gb_per_s")
    of_links = ("gpus_per_node", "nvlink_gb_per_s", "link_gb_per_s", "gpu_hour_price")
    if given.gpu is None:
        for name in (*of_card, *of_links):
            if getattr(given, name) is not None:
                option = "--" + name.replace("_", "-")
                raise UserError(f"--gpu: got none with {option}, allowed {', '.join(CARDS)}; add --gpu NAME")
        return None
    card = find_card(given.gpu, given.gpu_memory_gib, given.gpu_tflops, given.gpu_memory_gb_per_s)
    if given.gpus is None:
        raise UserError("--gpus: got none with --gpu, allowed a number of GPUs; add --gpus N")
    cluster = find_cluster(card, given.gpus, given.gpus_per_node, given.nvlink_gb_per_s, given.link_gb_per_s)
    return Hardware(card, cluster, given.gpu_hour_price)


def main() -> int:
    given = _parser().parse_intermixed_args()
    hardware = _hardware(given)
    if given.compare:
        if given.search:
            raise UserError("--compare: got it with --search, allowed one of the two; leave one out")
        compared = make_comparison(given.compare, given.words, given.gpus, hardware)
        print(json.dumps(compared) if given.json else format_comparison(compared))
        return 0
    if not given.words:
        raise UserError("command line: got no CONFIG, allowed a YAML file or a name from configs/; see --help")
    config, *overrides = given.words
    if given.search:
        if hardware is None:
            raise UserError(f"--gpu: got none with --search, allowed {', '.join(CARDS)}; add --gpu NAME and --gpus N")
        found = make_search(config, overrides, given.gpus, hardware)
        print(json.dumps(found) if given.json else format_search(found))
        return 0 if found["layouts"] else NOTHING_FITS
    plan = make_plan(config, overrides, given.gpus, hardware)
    print(json.dumps(plan) if given.json else format_plan(plan))
    return 0


if __name__ == "__main__":
    run_main(main)

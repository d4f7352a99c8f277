"""Prints what a configuration costs before anything is built: parameters, cache, operations, memory.

    python tools/plan.py CONFIG [section.key=value ...] [--gpus N] [--gpu h100] [--search] [--json]

CONFIG is a YAML file or a bare name from configs/run or configs/model. Exit code 2 on a user's mistake.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.errors import UserError
from egmla_megatron.report.cards import CARDS, find_card
from egmla_megatron.report.plan import format_plan, format_search, make_plan, make_search


def main() -> None:
    parser = CommandParser(description="Cost of a configuration: parameters, cache, operations, memory.")
    add = parser.add_argument
    add("config", help="YAML file, or a name from configs/run or configs/model")
    add("overrides", nargs="*", metavar="section.key=value")
    add("--gpus", "--world-size", type=int, metavar="N", help="ranks: their layout and the memory of each")
    add("--gpu", metavar="NAME", help=f"does it fit? {', '.join(CARDS)}, or any name with the two options that follow")
    add("--gpu-memory-gib", type=float, metavar="GIB", help="memory of one GPU")
    add("--gpu-tflops", type=float, metavar="TFLOPS", help="dense bf16 peak of one GPU")
    add("--search", action="store_true", help="layouts on --gpus N that fit into --gpu, best first")
    add("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_intermixed_args()
    card = find_card(given.gpu, given.gpu_memory_gib, given.gpu_tflops) if given.gpu else None
    if (given.search or card) and given.gpus is None:
        raise UserError("--gpus: got none with --gpu or --search, allowed a number of GPUs; add --gpus N")
    if given.search:
        if card is None:
            raise UserError(f"--gpu: got none with --search, allowed {', '.join(CARDS)}; add --gpu NAME")
        found = make_search(given.config, given.overrides, given.gpus, card)
        print(json.dumps(found) if given.json else format_search(found))
        return
    plan = make_plan(given.config, given.overrides, given.gpus, card)
    print(json.dumps(plan) if given.json else format_plan(plan))


if __name__ == "__main__":
    run_main(main)

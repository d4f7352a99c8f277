"""Prints what a configuration costs before anything is built: parameters, cache, operations, memory.

    python tools/plan.py CONFIG [section.key=value ...] [--world-size N] [--json]

CONFIG is a YAML file or a bare name from configs/run or configs/model. Exit code 2 on a user's mistake.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.report.plan import format_plan, make_plan


def main() -> None:
    parser = CommandParser(description="Cost of a configuration: parameters, cache, operations, memory.")
    parser.add_argument("config", help="YAML file, or a name from configs/run or configs/model")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--world-size", type=int, help="also check and print the parallel layout on so many ranks")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_intermixed_args()
    plan = make_plan(arguments.config, arguments.overrides, arguments.world_size)
    print(json.dumps(plan) if arguments.json else format_plan(plan))


if __name__ == "__main__":
    run_main(main)

"""Measures replicated against dimension-wise sharded gating tables, variants one after another on the same ranks.

    bash launch/bench_sharding.sh [options] [section.key=value ...]              all GPUs of this machine
    sbatch --nodes=4 launch/bench_sharding.sh [options]                          one rank a node
    python tools/bench_sharding.py --nodes-on-this-machine 2 --link 400mbit      no GPU: networks made here (root)

Progress goes to stderr, a Markdown table beside the paper's numbers to stdout; --json, --markdown and --plot write
files. The JSON file is one object {hardware, software, commit, command, settings, link, rows}. Exit code 2 on a user's
mistake.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.bench.command import main
from egmla_megatron.cli import run_main

if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))

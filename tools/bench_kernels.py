"""Times every kernel of a training step alone, beside what the machine's memory and tensor cores allow.

    python tools/bench_kernels.py CONFIG [section.key=value ...] [--json FILE] [--repeats N] [--distinct-fraction F]

One micro-batch on one device, one process, no launcher. Measured first: a large copy and large matrix products, with
which every kernel is compared. A Markdown table comes last on stdout; --json writes {hardware, software, commit,
command, settings, remarks, machine, rows, sum}. Without a GPU it runs too, in fp32 by the host's clock. Exit code 2 on
a user's mistake.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.bench.roofline.options import kernel_bench
from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.environment import gpu_count
from egmla_megatron.quiet import quiet_libraries
from egmla_megatron.train.machine import check_machine


def main() -> int:
    parser = CommandParser(description="Every kernel of a training step beside what the machine allows.")
    add = parser.add_argument
    add("config", help="YAML file, or a name from configs/run or configs/model")
    add("overrides", nargs="*", metavar="section.key=value", help="settings of the configuration")
    add("--repeats", type=int, default=20, help="measurements of every kernel (20)")
    add("--distinct-fraction", type=float, default=0.2, help="distinct ids / tokens of the micro-batch (0.2)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    given = parser.parse_intermixed_args()
    cuda = gpu_count() > 0
    bench = kernel_bench(given.config, given.overrides, given.repeats, given.distinct_fraction, given.json, cuda=cuda)
    check_machine(bench.cfg)
    quiet_libraries()
    from egmla_megatron.bench.roofline.session import run_kernel_bench

    return run_kernel_bench(bench, ["tools/bench_kernels.py", *sys.argv[1:]])


if __name__ == "__main__":
    run_main(main)

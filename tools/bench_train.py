"""Measures training steps of a configuration beside variants of it, one after another in one job on the same ranks.

    python -m egmla_megatron.launch --standalone --nproc-per-node 1 tools/bench_train.py CONFIG \\
        --variants base mla graph mla+graph mine:model.kv_lora_rank=128 [section.key=value ...]

The first variant is what the others are compared with; without `graph` or an override every operation is launched by
the host, whatever CONFIG says of train.cuda_graph. What reporting costs: `--variants base reported
reported+no_step_times --rounds 6` (steps alone, with everything the trainer reports through the sinks of `logging`, and
that without the split of the step's time). A Markdown table comes last on stdout; --json writes {hardware,
software, commit, command, rows}. Exit code 2 on a user's mistake.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.bench.schedule import MOST_ROUNDS, MOST_STEPS, Schedule
from egmla_megatron.bench.train_variants import VARIANTS, checked_variant, choose_variants, precision_remark, same_as
from egmla_megatron.cli import CommandParser, check_count, run_main
from egmla_megatron.environment import gpu_count, whole_number
from egmla_megatron.folders import refuse_unwritable_file
from egmla_megatron.quiet import quiet_libraries


def main() -> int:
    parser = CommandParser(description="Training speed of a configuration beside variants of it.")
    add = parser.add_argument
    add("config", help="YAML file, or a name from configs/run or configs/model")
    add("overrides", nargs="*", metavar="section.key=value", help="settings common to all variants")
    add("--variants", nargs="+", default=["base"], metavar="NAME", help=f"{', '.join(VARIANTS)}; a+b; NAME:k=v,k=[v,w]")
    add("--steps", type=int, default=20, help="measured steps of a variant and round (20)")
    add("--warmup", type=int, default=6, help="steps before them (6)")
    add("--rounds", type=int, default=1, help="times that all variants run, every other time in reverse order (1)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    given = parser.parse_intermixed_args()
    for name, most in (("steps", MOST_STEPS), ("warmup", MOST_STEPS), ("rounds", MOST_ROUNDS)):
        check_count(f"--{name}", getattr(given, name), 1, most)
    if given.json is not None:
        refuse_unwritable_file("--json", given.json)
    schedule = Schedule(given.warmup, given.steps, 0)
    ranks, cuda = whole_number("WORLD_SIZE", 1, 1), gpu_count() > 0
    variants = choose_variants(given.variants)
    checked = {
        each: checked_variant(given.config, given.overrides, each, schedule, ranks, cuda=cuda) for each in variants
    }
    configs = {each: cfg for each, (cfg, _) in checked.items()}
    layouts = {each: layout for each, (_, layout) in checked.items()}
    remark = precision_remark(given.config, given.overrides, configs[variants[0]])
    quiet_libraries()
    from egmla_megatron.bench.train_session import TrainBench, run_train_bench
    from egmla_megatron.parallel.child_processes import stop_with_launcher

    stop_with_launcher()
    bench = TrainBench(configs, layouts, same_as(configs, cuda=cuda), schedule, given.rounds, remark, given.json)
    return run_train_bench(bench, ["tools/bench_train.py", *sys.argv[1:]])


if __name__ == "__main__":
    run_main(main)

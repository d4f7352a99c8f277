"""Evaluates a checkpoint.

    python tools/evaluate.py ppl CHECKPOINT|RUN_DIR --data PREFIX [PREFIX ...] [--sequences N] [--json FILE]
        [parallel.KEY=VALUE train.micro_batch_size=N ...]
    python tools/evaluate.py tasks HF_DIR|CHECKPOINT|RUN_DIR --tasks NAME[,NAME ...] [--include-path DIR] [--limit N]
        [--num-fewshot N] [--batch-size N] [--device D] [--bos auto|yes|no] [--tokenizer PATH] [--hf-dir DIR]
        [--json FILE]
    python -m egmla_megatron.launch --standalone --nproc-per-node 8 tools/evaluate.py ppl ...   on several GPUs
    sbatch launch/evaluate.sh ppl|tasks ...                                                     as a job

ppl: loss and perplexity on whole data sets (PREFIX.bin and .idx), each by itself, every sequence once.
tasks: EleutherAI's lm_eval (`pip install 'lm-eval[hf]'`) on the exported model, in one process; a checkpoint is
exported first, into a temporary folder or --hf-dir.
The table goes to stdout. Exit code 2 on a user's mistake.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.environment import whole_number
from egmla_megatron.folders import refuse_unwritable_file
from egmla_megatron.quiet import quiet_libraries


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options, and the words that no option took."""
    parser = CommandParser(description="Quality of a checkpoint.")
    commands = parser.add_subparsers(dest="what", required=True)
    ppl = commands.add_parser("ppl", help="loss and perplexity on data sets")
    add = ppl.add_argument
    add("checkpoint", help="a checkpoint folder, or a run folder (its newest complete checkpoint)")
    add("overrides", nargs="*", metavar="section.key=value", help="layout and micro-batch")
    add("--data", nargs="+", required=True, metavar="PREFIX", help="data sets, each scored by itself")
    add("--sequences", type=int, default=0, metavar="N", help="of each data set at most (0: all)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    tasks = commands.add_parser("tasks", help="tasks of lm_eval")
    add = tasks.add_argument
    add("checkpoint", help="an exported folder, a checkpoint folder, or a run folder (its newest complete checkpoint)")
    add("--tasks", required=True, metavar="NAME[,NAME ...]", help="tasks, groups or tags of lm_eval, or YAML files")
    add("--include-path", default="", metavar="DIR", help="folder with tasks of your own")
    add("--limit", type=int, default=0, metavar="N", help="documents of each task at most (0: all)")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (default: as the task says)")
    add("--batch-size", type=int, default=8, metavar="N", help="sequences at a time (default 8)")
    add("--device", default="", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add("--bos", choices=("auto", "yes", "no"), default="auto", help="BOS before each text (auto: as the tokenizer)")
    add("--tokenizer", metavar="PATH", help="for the export of a checkpoint (default: data.tokenizer of the run)")
    add("--hf-dir", default="", metavar="DIR", help="keep the export of a checkpoint there")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    given, late = parser.parse_known_args()
    unknown = [word for word in late if word.startswith("-") or given.what == "tasks"]
    if unknown:
        parser.error(f"unknown {'option' if unknown[0].startswith('-') else 'word'} {unknown[0]}")
    return given, late


def perplexity(given: argparse.Namespace, late: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Lines of the table, and the same for --json."""
    from egmla_megatron.evaluate.perplexity import as_rows, as_table, measure, plan_evaluation

    overrides = [*given.overrides, *late]
    prefixes = [word for word in given.data if "=" not in word]  # settings may follow the prefixes
    overrides += [word for word in given.data if "=" in word]
    ranks = whole_number("WORLD_SIZE", 1, 1)
    evaluation = plan_evaluation(given.checkpoint, prefixes, overrides, given.sequences, ranks)
    scores = measure(evaluation)
    return as_table(evaluation, scores), as_rows(evaluation, scores)


def tasks(given: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Lines of the table, and the same for --json."""
    from egmla_megatron.evaluate.tasks import TaskOptions, as_rows, as_table, load_tasks, plan_tasks, run_tasks

    options = TaskOptions(
        names=tuple(name for name in given.tasks.split(",") if name),
        include_path=given.include_path,
        limit=given.limit,
        num_fewshot=given.num_fewshot,
        batch_size=given.batch_size,
        device=given.device,
        bos=given.bos,
        tokenizer=given.tokenizer,
        hf_dir=given.hf_dir,
    )
    checkpoint = plan_tasks(given.checkpoint, options, whole_number("WORLD_SIZE", 1, 1))
    run = run_tasks(given.checkpoint, checkpoint, load_tasks(options), options)
    return as_table(run), as_rows(run)


def main() -> int:
    given, late = parse_arguments()
    if given.json is not None:
        refuse_unwritable_file("--json", given.json)
    quiet_libraries()
    lines, rows = perplexity(given, late) if given.what == "ppl" else tasks(given)
    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(lines))
        if given.json is not None:
            given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_main(main)

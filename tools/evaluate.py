"""Evaluates a checkpoint.

    python tools/evaluate.py ppl CHECKPOINT|RUN_DIR --data PREFIX [PREFIX ...] [--sequences N] [--json FILE]
        [parallel.KEY=VALUE train.micro_batch_size=N ...]
    python -m egmla_megatron.launch --standalone --nproc-per-node 8 tools/evaluate.py ppl ...   on several GPUs
    sbatch launch/evaluate.sh ppl ...                                                           as a job

ppl: loss and perplexity on whole data sets (PREFIX.bin and .idx), each by itself, every sequence once. Tasks of lm_eval
run on the exported model: `lm_eval --model hf --model_args pretrained=HF_DIR,trust_remote_code=True --tasks ...`.
The table goes to stdout. Exit code 2 on a user's mistake.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.environment import whole_number
from egmla_megatron.folders import refuse_unwritable_file
from egmla_megatron.quiet import quiet_libraries


def main() -> int:
    parser = CommandParser(description="Quality of a checkpoint.")
    ppl = parser.add_subparsers(dest="what", required=True).add_parser("ppl", help="loss and perplexity on data sets")
    add = ppl.add_argument
    add("checkpoint", help="a checkpoint folder, or a run folder (its newest complete checkpoint)")
    add("overrides", nargs="*", metavar="section.key=value", help="layout and micro-batch")
    add("--data", nargs="+", required=True, metavar="PREFIX", help="data sets, each scored by itself")
    add("--sequences", type=int, default=0, metavar="N", help="of each data set at most (0: all)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    given, late = parser.parse_known_args()
    overrides = [*given.overrides, *late]
    prefixes = [word for word in given.data if "=" not in word]  # settings may follow the prefixes
    overrides += [word for word in given.data if "=" in word]
    unknown = [word for word in late if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}")
    if given.json is not None:
        refuse_unwritable_file("--json", given.json)
    quiet_libraries()
    from egmla_megatron.evaluate.perplexity import as_rows, measure, plan_evaluation

    evaluation = plan_evaluation(
        given.checkpoint, prefixes, overrides, given.sequences, whole_number("WORLD_SIZE", 1, 1)
    )
    scores = measure(evaluation)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{evaluation.checkpoint}, step {evaluation.step}\n")
        print("| data | val_loss (nats per token) | val_ppl | tokens | sequences | left out | seconds |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for score in scores:
            print(
                f"| {score.data} | {score.val_loss:.5f} | {score.val_ppl:.4f} | {score.tokens:,} | "
                f"{score.sequences:,} | {score.left_out_sequences} | {score.seconds:.1f} |"
            )
        if given.json is not None:
            given.json.write_text(json.dumps(as_rows(evaluation, scores), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_main(main)

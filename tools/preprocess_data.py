"""Makes indexed data sets from ClimbMix's token lists or from any text.

    python tools/preprocess_data.py --input FILE|GLOB|FOLDER|OWNER/NAME ... --output-prefix data/mine [options]

Writes PREFIX.bin/.idx (training), PREFIX_val.bin/.idx (validation) and a manifest PREFIX.json for each. Started again
after any interruption, it goes on with the parts that are not finished. Under Slurm every task takes its share and the
last one merges. Exit code 2 and one line when input, options or disk are wrong.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.preprocess.command import preprocess
from egmla_megatron.preprocess.options import Options, prefix_from, shard_from


def parse(arguments: list[str]) -> Options:
    """The command line as Options."""
    parser = CommandParser(description="Make PREFIX.bin/.idx and PREFIX_val.bin/.idx from token lists or text.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="INPUT", help="parquet, jsonl(.gz/.zst), .txt (a document each), "
        "globs, folders, or data sets: OWNER/NAME or hf:NAME[@REVISION][:CONFIG[:SPLIT]]")  # fmt: skip
    add("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx, P.json and P_val.*")
    add("--tokenizer", default="gpt2", help="gpt2, a folder with tokenizer files, or a sentencepiece .model")
    add("--tokens-column", default="tokens", help="lists of ids")
    add("--text-column", default="text")
    add("--vocab-size", type=int, help="ids must be below this (default: the tokenizer's)")
    add("--eos-id", type=int, help="end-of-document id (default: the tokenizer's)")
    add("--append-eos", choices=("auto", "always", "never"), default="auto", help="auto: exactly one at every "
        "document's end, whatever the rows have; always: one more, unseen; never: rows as they are")  # fmt: skip
    add("--shuffle", action="store_true", default=True, help="shuffle documents (default)")
    add("--no-shuffle", action="store_false", dest="shuffle", help="keep the order of the inputs")
    add("--seed", type=int, default=1234, help="of the shuffle")
    add("--validation-fraction", type=float, default=0.0005, help="share of documents, chosen by their hash: the same "
        "ones when files are added; 0: none")  # fmt: skip
    add("--dedupe", action="store_true", help="drop exact repetitions of documents")
    add("--by-cluster", action="store_true", help="also write one data set per cluster_id, for blends")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one per CPU)")
    add("--shard", metavar="i/n", help="this task's share, from 0 (default: SLURM_PROCID/SLURM_NTASKS, else 0/1)")
    add("--on-error", choices=("stop", "skip"), default="stop", help="at rows or files that cannot be read")
    add("--overwrite", action="store_true", help="replace outputs that exist")
    given = vars(parser.parse_args(arguments))
    shard, shards = shard_from(given.pop("shard"), dict(os.environ))
    return Options(
        inputs=tuple(given.pop("input")),
        output=prefix_from(given.pop("output_prefix")),
        shard=shard,
        shards=shards,
        **given,
    )


def main() -> None:
    preprocess(parse(sys.argv[1:]))


if __name__ == "__main__":
    run_main(main)

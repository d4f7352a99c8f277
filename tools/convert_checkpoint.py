"""Converts training checkpoints to Hugging Face folders and back.

    python tools/convert_checkpoint.py to-hf SRC DST [--dtype auto|bf16|fp16|fp32] [--vocab-size N|tokenizer]
        [--tokenizer PATH | --no-tokenizer] [--max-shard-size SIZE] [--layout egmla|deepseek_v3|gpt2] [--verify]
    python tools/convert_checkpoint.py from-hf SRC DST [--dtype auto|bf16|fp16|fp32] [--vocab-size N] [--step N]

to-hf: SRC is a checkpoint folder or a run folder (its newest checkpoint), of any layout; DST the folder to create.
from-hf: DST is a checkpoint folder for checkpoint.load=DST: weights alone, with a fresh optimizer.
Exit code 2 on a user's mistake, 1 when --verify finds a difference.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.quiet import quiet_libraries

DTYPES = ("auto", "bf16", "fp16", "fp32")


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(description="Training checkpoints to Hugging Face folders and back.")
    commands = parser.add_subparsers(dest="command", required=True)
    to_hf = commands.add_parser("to-hf", help="write safetensors, config.json, model code and tokenizer files")
    to_hf.add_argument("src", help="checkpoint folder, or a run folder for its newest one")
    to_hf.add_argument("dst", help="folder to create")
    to_hf.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (auto: as in the checkpoint)")
    tokenizer = to_hf.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", help="folder with tokenizer files or sentencepiece .model (default: data.tokenizer of the run)"
    )
    tokenizer.add_argument("--no-tokenizer", action="store_true", help="export the model alone")
    to_hf.add_argument(
        "--vocab-size",
        default="",
        metavar="N|tokenizer",
        help="keep so many rows of the embeddings, or as many as the tokenizer has ids (default: all, with padding)",
    )
    to_hf.add_argument(
        "--max-shard-size", default="4096", metavar="SIZE", help="of one file: MiB, or 5GB, 500MiB (default 4096)"
    )
    to_hf.add_argument(
        "--layout",
        choices=("egmla", "deepseek_v3", "gpt2"),
        default="",
        help="class that loads it (default: gpt2 for MHA, else egmla; deepseek_v3: plain MLA without model code)",
    )
    to_hf.add_argument("--verify", action="store_true", help="compare logits with megatron-core's model afterwards")
    from_hf = commands.add_parser("from-hf", help="write a checkpoint that training continues from")
    from_hf.add_argument("src", help="folder written by to-hf, or by save_pretrained of such a model")
    from_hf.add_argument("dst", help="checkpoint folder to create")
    from_hf.add_argument("--dtype", choices=DTYPES, default="auto", help="of the stored weights (auto: as in SRC)")
    from_hf.add_argument("--vocab-size", type=int, metavar="N", help="rows of the embeddings: pads or cuts them")
    from_hf.add_argument("--step", type=int, default=0, help="optimizer steps that count as done (default 0)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    quiet_libraries()
    from transformers.utils import logging

    from egmla_megatron.convert.command import Export, convert_from_hf, convert_to_hf, shard_bytes

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if arguments.command == "from-hf":
        options = {"dtype": arguments.dtype, "vocab_size": arguments.vocab_size, "step": arguments.step}
        convert_from_hf(arguments.src, arguments.dst, **options)
        return 0
    export = Export(
        dtype=arguments.dtype,
        tokenizer="" if arguments.no_tokenizer else arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        max_shard_bytes=shard_bytes(arguments.max_shard_size),
        layout=arguments.layout,
        verify=arguments.verify,
    )
    comparison = convert_to_hf(arguments.src, arguments.dst, export)
    if comparison is not None and not comparison.equal:
        print(f"error: {arguments.dst} does not compute what the checkpoint does; do not use it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)

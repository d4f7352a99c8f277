"""Converts training checkpoints to Hugging Face folders.

    python tools/convert_checkpoint.py to-hf SRC DST [--dtype bf16|fp16|fp32] [--tokenizer PATH | --no-tokenizer]
        [--tokenizer-vocab-size N] [--max-shard-size MIB] [--verify]

SRC is a checkpoint folder or a run folder (its newest checkpoint), DST the folder to create.
Exit code 2 on a user's mistake.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.quiet import quiet_libraries


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(description="Training checkpoint -> Hugging Face folder.")
    commands = parser.add_subparsers(dest="command", required=True)
    to_hf = commands.add_parser("to-hf", help="write safetensors, config.json, model code and tokenizer files")
    to_hf.add_argument("src", help="checkpoint folder")
    to_hf.add_argument("dst", help="folder to create")
    to_hf.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the written weights")
    to_hf.add_argument(
        "--tokenizer", help="folder with tokenizer files or sentencepiece .model (default: data.tokenizer of the run)"
    )
    to_hf.add_argument("--no-tokenizer", action="store_true", help="export the model alone")
    to_hf.add_argument("--tokenizer-vocab-size", type=int, help="cut the vocabulary padding to this many rows")
    to_hf.add_argument("--max-shard-size", type=int, default=4096, help="MiB of one safetensors file")
    to_hf.add_argument("--verify", action="store_true", help="compare logits with the plain torch model afterwards")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    quiet_libraries()
    from egmla_megatron.checkpoint.load import read_full_weights
    from egmla_megatron.convert.command import convert_to_hf

    weights, model, manifest = read_full_weights(arguments.src)
    tokenizer = arguments.tokenizer or manifest.config["data"]["tokenizer"] or None
    if arguments.no_tokenizer:
        tokenizer = None
    facts = {"optimizer steps": f"{manifest.step:,}", "training tokens": f"{manifest.consumed_tokens:,}"}
    convert_to_hf(
        weights,
        model,
        facts,
        arguments.dst,
        dtype_name=arguments.dtype,
        tokenizer=tokenizer,
        tokenizer_vocab_size=arguments.tokenizer_vocab_size,
        max_shard_mib=arguments.max_shard_size,
        verify=arguments.verify,
    )


if __name__ == "__main__":
    run_main(main)

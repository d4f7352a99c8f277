"""Continues prompts with an exported model, on the terminal as it goes.

    python tools/generate.py HF_DIR --prompt TEXT [--prompt TEXT ...] | --prompts-file FILE [--max-new-tokens N]
        [--temperature T] [--top-p P] [--top-k K] [--seed S] [--num-samples K] [--batch-size N] [--dtype D]
        [--device D] [--precompute-gates device|host] [--json]

Text goes to stdout, speed and cache size to stderr. Exit code 2 on a user's mistake.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, check_count, run_main
from egmla_megatron.errors import UserError
from egmla_megatron.quiet import quiet_libraries


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(description="Text from an exported model folder.")
    parser.add_argument("hf_dir", help="folder written by tools/convert_checkpoint.py to-hf")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="may be given several times")
    source.add_argument("--prompts-file", help="one prompt a line; .jsonl: a JSON text, or an object with prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=0, help="0: all")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--num-samples", type=int, default=1, help="continuations of each prompt")
    parser.add_argument("--batch-size", type=int, default=32, help="prompts at a time, 0: all (default 32)")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto", help="auto: as exported")
    parser.add_argument("--device", default="", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    parser.add_argument(
        "--precompute-gates", choices=("device", "host"), help="EG-MLA-A: finished gates of the whole vocabulary"
    )
    parser.add_argument("--json", action="store_true", help="one JSON list of lists of strings, without the prompts")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    quiet_libraries()
    import torch
    from transformers.utils import logging

    from egmla_megatron.inference.generate import Sampling, Usage, generate, load_exported
    from egmla_megatron.inference.prompts import read_prompts

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    sampling = Sampling(
        arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.seed, arguments.top_k
    )
    sampling.check()
    prompts = read_prompts(arguments.prompts_file) if arguments.prompts_file else arguments.prompt
    check_count("--num-samples", arguments.num_samples, 1, 65_536)
    check_count("--batch-size", arguments.batch_size, 0, 65_536)
    dtypes: dict[str, torch.dtype | str] = {
        "auto": "auto",
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }
    model, tokenizer = load_exported(arguments.hf_dir, dtype=dtypes[arguments.dtype], device=arguments.device)
    if arguments.precompute_gates:
        if getattr(model.config, "gate", "none") == "none":
            raise UserError(f"precompute-gates: {arguments.hf_dir} is a model without gates; leave it out")
        size = model.precompute_gates(on_host=arguments.precompute_gates == "host")
        print(f"precomputed gates: {size:,} bytes ({arguments.precompute_gates})", file=sys.stderr)
    usage = Usage()
    samples = generate(
        model,
        tokenizer,
        prompts,
        sampling,
        num_samples=arguments.num_samples,
        batch_size=arguments.batch_size,
        write=None if arguments.json else show,
        usage=usage,
    )
    if arguments.json:
        print(json.dumps(samples))
    print(usage, file=sys.stderr)


def show(text: str) -> None:
    """Text to the terminal, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    run_main(main)

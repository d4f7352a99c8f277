"""Continues prompts with an exported model.

    python tools/generate.py HF_DIR --prompt TEXT [--prompt TEXT ...] [--max-new-tokens N] [--temperature T]
        [--top-p P] [--seed S] [--num-samples K] [--json]

Exit code 2 on a user's mistake.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, run_main


def main() -> None:
    parser = CommandParser(description="Text from an exported model folder.")
    parser.add_argument("hf_dir", help="folder written by tools/convert_checkpoint.py to-hf")
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--num-samples", type=int, default=1, help="continuations of each prompt")
    parser.add_argument("--json", action="store_true", help="one JSON list of lists of strings")
    arguments = parser.parse_args()
    from egmla_megatron.inference.generate import Sampling, generate, load_exported

    sampling = Sampling(arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.seed)
    sampling.check()
    model, tokenizer = load_exported(arguments.hf_dir)
    samples = generate(model, tokenizer, arguments.prompt, sampling, num_samples=arguments.num_samples)
    if arguments.json:
        print(json.dumps(samples))
        return
    for prompt, continuations in zip(arguments.prompt, samples, strict=True):
        for continuation in continuations:
            print(f"{prompt}{continuation}\n{'-' * 40}")


if __name__ == "__main__":
    run_main(main)

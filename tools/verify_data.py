"""Checks indexed data sets: index, sizes and manifest; with --full every token and the checksums.

    python tools/verify_data.py PREFIX [PREFIX ...] [--full | --sample] [--vocab-size N]

Exit code 2 and one line that names file, fault and cure when something is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, check_count, run_main
from egmla_megatron.data.blend import refuse_suffix
from egmla_megatron.data.verify import verify_prefix


def main() -> None:
    parser = CommandParser(description="Check PREFIX.bin, PREFIX.idx and PREFIX.json.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path without .bin")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--full", action="store_true", help="read every token and compare checksums")
    depth.add_argument("--sample", action="store_true", help="read 64 evenly spaced blocks of a million tokens")
    parser.add_argument("--vocab-size", type=int, help="ids must be below this (default: the manifest's)")
    arguments = parser.parse_args()
    check_count("--vocab-size", arguments.vocab_size, 1, 2**31 - 1)
    for prefix in arguments.prefixes:
        refuse_suffix(prefix, "PREFIX")
        info = verify_prefix(prefix, vocab_size=arguments.vocab_size, full=arguments.full, sample=arguments.sample)
        known = "with manifest" if info.manifest else "no manifest"
        print(f"{prefix}: ok, {info.tokens:,} tokens, {info.documents:,} documents, {info.dtype}, {known}")


if __name__ == "__main__":
    run_main(main)

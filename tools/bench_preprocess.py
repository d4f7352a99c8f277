"""Measures the preprocessor beside Megatron-LM's and datatrove's on the same text, and verify_data beside a plain read.

    python tools/bench_preprocess.py --text corpus.jsonl --tokenizer GPT2_FOLDER --record FILE.json \
        [--megatron Megatron-LM/tools/preprocess_data.py] [--datatrove-python VENV/bin/python]

GPT2_FOLDER holds a Hugging Face GPT-2 tokenizer (vocab.json, merges.txt, tokenizer.json, tokenizer_config.json).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, check_count, run_main
from egmla_megatron.preprocess.bench import Bench, Peers
from egmla_megatron.preprocess.measure import hardware


def main() -> None:
    parser = CommandParser(description="Measure text, parquet, jsonl and verification; writes one JSON record.")
    parser.add_argument("--text", type=Path, required=True, help="jsonl with a text column")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a Hugging Face GPT-2 tokenizer")
    parser.add_argument("--record", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--megatron", default="", help="Megatron-LM's tools/preprocess_data.py")
    parser.add_argument("--datatrove-python", default="", help="an interpreter that has datatrove")
    parser.add_argument("-n", type=int, default=5, help="runs of everything")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--copies", type=int, default=4, help="of the text's ids in the token lists")
    parser.add_argument("--verify-bytes", type=int, default=2_000_000_000)
    parser.add_argument("--folder", type=Path, help="scratch (default: a temporary folder)")
    given = parser.parse_args()
    check_count("-n", given.n, 1, 1000)
    check_count("--workers", given.workers, 1, 4096)
    check_count("--copies", given.copies, 1, 10_000)
    check_count("--verify-bytes", given.verify_bytes, 1, 2**50)
    root = Path(__file__).resolve().parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        peers = Peers(given.megatron, given.datatrove_python)
        bench = Bench(Path(scratch), given.text, given.tokenizer, peers, n=given.n, workers=given.workers)
        record = {
            "what": "preprocessing beside its peers, whole commands on the same file",
            "hardware": hardware(),
            "commit": commit.stdout.strip(),
            "command": "python tools/bench_preprocess.py --text FILE --tokenizer GPT2_FOLDER --megatron ... "
            f"--datatrove-python ... -n {given.n} --workers {given.workers} --copies {given.copies}",
            "text": bench.text_table(),
            "token_lists": bench.tokens_table(given.copies),
            "verify": bench.verify_table(given.verify_bytes),
        }
    given.record.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    run_main(main)

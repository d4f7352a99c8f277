"""What a preprocessing run was asked to do."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from egmla_megatron.cli import check_count
from egmla_megatron.errors import UserError
from egmla_megatron.folders import refuse_unwritable

__all__ = ["Options", "check_options", "prefix_from", "shard_from"]

_LONGEST_NAME = 180  # bytes: names of parts and clusters are longer, and file systems take 255
_MOST_WORKERS = 4096
_LARGEST_VOCABULARY = 2**24  # ids; every worker remembers which it saw


@dataclass(frozen=True)
class Options:
    """One run of tools/preprocess_data.py; the tool's --help describes each."""

    inputs: tuple[str, ...]  # files, globs, folders, hub names
    output: Path  # prefix: OUTPUT.bin, .idx, .json
    tokenizer: str = "gpt2"  # gpt2, a folder, or a sentencepiece .model
    tokens_column: str = "tokens"
    text_column: str = "text"
    vocab_size: int | None = None  # ids must be below; None: the tokenizer's
    eos_id: int | None = None  # end-of-document id; None: the tokenizer's
    append_eos: Literal["auto", "always", "never"] = "auto"
    shuffle: bool = True  # documents
    seed: int = 1234
    validation_fraction: float = 0.0005  # share of documents, by their hash
    dedupe: bool = False  # drop exact repetitions of documents
    by_cluster: bool = False  # one data set per cluster_id
    workers: int = 1  # processes
    shard: int = 0  # this task's number
    shards: int = 1  # tasks that share the work and one output folder
    on_error: Literal["stop", "skip"] = "stop"
    overwrite: bool = False


def shard_from(text: str | None, environment: dict[str, str]) -> tuple[int, int]:
    """(i, n) of `--shard i/n`, counted from 0; without it of Slurm's SLURM_PROCID and SLURM_NTASKS; else (0, 1)."""
    if text is None:
        rank, tasks = environment.get("SLURM_PROCID"), environment.get("SLURM_NTASKS")
        if rank is None or tasks is None:
            return 0, 1
        text = f"{rank}/{tasks}"
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise UserError(f"--shard: got {text!r}, allowed i/n with i from 0 to n-1; give 0/1 for everything")
    return int(found[1]), int(found[2])


def prefix_from(text: str) -> Path:
    """--output-prefix as a path. UserError when it names a folder, one of the files, or what cannot be written."""
    path = Path(text)
    if not path.name or text.endswith("/") or path.name == ".." or path.is_dir():
        raise UserError(
            f"--output-prefix: got {text!r}, allowed a folder and the start of a file name; for example {path / 'mine'}"
        )
    if path.suffix in (".bin", ".idx", ".json"):
        bare = path.with_suffix("")
        raise UserError(f"--output-prefix: got {text}, allowed a name without {path.suffix}; drop the suffix: {bare}")
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise UserError(f"--output-prefix: got a name of {len(path.name)} characters, allowed {_LONGEST_NAME} bytes")
    refuse_unwritable("--output-prefix", path.parent)
    return path


def check_options(options: Options) -> None:
    """UserError for values that cannot work."""
    if options.vocab_size is not None and not 1 <= options.vocab_size <= _LARGEST_VOCABULARY:
        raise UserError(
            f"--vocab-size: got {options.vocab_size}, allowed 1 to {_LARGEST_VOCABULARY}; leave it out for the "
            "tokenizer's"
        )
    if not 0 <= options.validation_fraction < 1:
        raise UserError(
            f"--validation-fraction: got {options.validation_fraction}, allowed 0 up to but not including 1; "
            "0.0005 is one document in two thousand"
        )
    check_count("--workers", options.workers, 1, _MOST_WORKERS)
    check_count("--seed", options.seed, 0, 2**63 - 1)
    if options.tokens_column == options.text_column:
        raise UserError(
            f"--tokens-column and --text-column: got {options.text_column!r} for both, allowed different names; "
            "a column holds either text or ids"
        )

"""Inputs as typed -> a list of input files with their kind, in a fixed order."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from egmla_megatron.errors import UserError
from egmla_megatron.preprocess import read_hub, read_jsonl, read_parquet
from egmla_megatron.preprocess.columns import Columns, UnreadableError
from egmla_megatron.preprocess.options import Options

__all__ = ["Source", "find_sources", "format_of"]

_SUFFIXES = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".json": "jsonl",
    ".json.gz": "jsonl",
    ".json.zst": "jsonl",
    ".txt": "txt",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """One input file, or one split of a hub data set."""

    name: str  # path, or hf:NAME...
    format: Literal["parquet", "jsonl", "txt", "hub"]
    kind: Literal["tokens", "text"]
    column: str  # "" for txt
    cluster_column: str  # "" where there is none
    bytes: int  # size on disk; 0: not known (hub)
    pieces: tuple[int, ...]  # bytes of each row group (parquet), one entry per shard (hub), else empty

    def record(self) -> dict[str, Any]:
        """What the manifest says of it."""
        kept = asdict(self)
        return {key: kept[key] for key in ("name", "format", "kind", "column", "bytes")}


def format_of(path: Path) -> str | None:
    """parquet, jsonl or txt by the file's name, else None."""
    return next((form for suffix, form in _SUFFIXES.items() if path.name.endswith(suffix)), None)


def find_sources(options: Options) -> tuple[list[Source], list[str]]:
    """(input files, faults of those left out under --on-error skip). UserError for anything that is not usable."""
    sources: list[Source] = []
    skipped: list[str] = []
    seen: set[str] = set()
    for text in options.inputs:
        for name in _expand(text):
            same = name if name.startswith(read_hub.PREFIX) else os.path.realpath(name)
            if same in seen:
                raise UserError(f"--input: {name} is given twice, allowed once; take one of the two away")
            seen.add(same)
            try:
                sources.append(_inspect(name, options))
            except UnreadableError as error:
                if options.on_error == "stop":
                    raise UserError(f"{error}; copy the file again, or leave it out with --on-error skip") from error
                skipped.append(str(error))
    if not sources:
        raise UserError(
            f"--input: got {' '.join(options.inputs)} without a usable file ({len(skipped)} unreadable), expected "
            "parquet, jsonl(.gz/.zst) or txt files; check the paths"
        )
    return sources, skipped


def _expand(text: str) -> Iterator[str]:
    """Local paths in sorted order, or the hub name itself."""
    path = Path(text)
    if not text.strip():
        raise UserError("--input: got an empty name, allowed a file, folder, glob or hub name; is a variable unset?")
    if text.startswith(read_hub.PREFIX):
        yield text
    elif path.is_dir():
        found = sorted(
            str(file) for file in path.rglob("*") if file.is_file() and format_of(file) and not _is_own(file)
        )
        if not found:
            raise UserError(f"--input: {text} holds no {', '.join(_SUFFIXES)} file; check the folder")
        yield from found
    elif path.is_file():
        yield text
    elif glob.has_magic(text):
        found = sorted(file for file in glob.glob(text, recursive=True) if Path(file).is_file())
        if not found:
            raise UserError(f"--input: no file matches {text}; check the pattern")
        yield from found
    elif _HUB_NAME.fullmatch(text) and format_of(path) is None:
        yield read_hub.PREFIX + text
    else:
        raise UserError(
            f"--input: {text} does not exist, expected a file, folder, glob or hub name (owner/name); check the path"
        )


def _is_own(path: Path) -> bool:
    """A manifest beside a data set, or part of an unfinished one: outputs may lie among the inputs."""
    beside = path.suffix == ".json" and path.with_suffix(".idx").exists()
    return beside or any(parent.suffix == ".parts" for parent in path.parents)


def _inspect(name: str, options: Options) -> Source:
    """Kind, column and size of one input."""
    columns = Columns(options.tokens_column, options.text_column)
    if name.startswith(read_hub.PREFIX):
        kind, column, cluster, shards = read_hub.inspect(name, columns)
        return Source(name, "hub", kind, column, cluster, 0, (1,) * shards)
    path = Path(name)
    form, size = format_of(path), path.stat().st_size
    if form is None:
        raise UserError(f"{name}: the name ends in none of {', '.join(_SUFFIXES)}; rename it or leave it out")
    if size == 0:
        raise UnreadableError(f"{name}: got 0 bytes, expected data")
    if form == "txt":
        return Source(name, "txt", "text", "", "", size, ())
    if form == "parquet":
        kind, column, cluster, pieces = read_parquet.inspect(path, columns)
        return Source(name, "parquet", kind, column, cluster, size, pieces)
    kind, column, cluster = read_jsonl.inspect(path, columns)
    return Source(name, "jsonl", kind, column, cluster, size, ())

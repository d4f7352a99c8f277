"""Cuts the inputs into parts: the unit of work, of parallelism and of resuming.

The cut depends on the inputs alone, never on workers or tasks, so any number of them can go on with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egmla_megatron.preprocess.options import Options
from egmla_megatron.preprocess.sources import Source
from egmla_megatron.preprocess.vocabulary import Vocabulary

__all__ = ["Part", "Plan", "Slice", "make_plan"]

_MIN_PART = 8 << 20  # input bytes: a part of text takes about a second
_MOST_PARTS = 2000  # and a folder stays listable


@dataclass(frozen=True)
class Slice:
    """A stretch of one source: bytes (jsonl), row groups (parquet), shards (hub); stop 0: to the end."""

    source: int
    start: int
    stop: int
    bytes: int  # of input, for the progress bar; 0: not known


@dataclass(frozen=True)
class Part:
    """Consecutive slices that one worker turns into one file."""

    number: int
    slices: tuple[Slice, ...]

    @property
    def bytes(self) -> int:
        """Input bytes, 0 where they are not known."""
        return sum(piece.bytes for piece in self.slices)


@dataclass(frozen=True)
class Plan:
    """Everything that decides what the parts hold."""

    sources: tuple[Source, ...]
    parts: tuple[Part, ...]
    vocabulary: Vocabulary
    append_eos: str
    on_error: str
    facts: dict[str, Any]  # what must be equal for finished parts to be reused; on_error need not

    @property
    def digest(self) -> str:
        """Identifies the plan."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()


def make_plan(options: Options, sources: Sequence[Source], vocabulary: Vocabulary) -> Plan:
    """The parts of `sources`, in their order."""
    target = max(_MIN_PART, sum(source.bytes for source in sources) // _MOST_PARTS)
    parts: list[Part] = []
    held: list[Slice] = []
    for piece in _slices(sources, target):
        whole = sources[piece.source].format == "hub"  # a hub shard's size is not known: one part each
        if held and (whole or sum(item.bytes for item in held) + piece.bytes > target):
            parts.append(Part(len(parts), tuple(held)))
            held = []
        held.append(piece)
    parts.append(Part(len(parts), tuple(held)))
    facts = {
        "inputs": [[s.name, s.kind, s.column, s.bytes, len(s.pieces), _changed(s)] for s in sources],
        "tokenizer": vocabulary.identity,
        "vocab_size": vocabulary.size,
        "eos_id": vocabulary.eos_id,
        "append_eos": options.append_eos,
        "part_bytes": target,
    }
    return Plan(tuple(sources), tuple(parts), vocabulary, options.append_eos, options.on_error, facts)


def _changed(source: Source) -> int:
    """Time of the last change in ns, 0 for the hub."""
    return 0 if source.format == "hub" else Path(source.name).stat().st_mtime_ns


def _slices(sources: Sequence[Source], target: int) -> Iterator[Slice]:
    for number, source in enumerate(sources):
        if source.format in ("parquet", "hub"):
            yield from _grouped(number, source, target)
        elif source.format == "jsonl" and source.name.endswith((".jsonl", ".json")):
            starts = range(0, source.bytes, target)
            for start in starts:
                stop = min(start + target, source.bytes)
                yield Slice(number, start, stop, stop - start)
        else:
            yield Slice(number, 0, 0, source.bytes)


def _grouped(number: int, source: Source, target: int) -> Iterator[Slice]:
    """Row groups up to the target together; hub shards one by one."""
    start, held = 0, 0
    for index, size in enumerate(source.pieces):
        if index > start and (source.format == "hub" or held + size > target):
            yield Slice(number, start, index, held if source.bytes else 0)
            start, held = index, 0
        held += size
    yield Slice(number, start, len(source.pieces), held if source.bytes else 0)

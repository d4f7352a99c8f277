"""Finds bytes of a checkpoint that changed behind its back, on a disk or on the way from one.

Every piece of a data file is a zip archive that torch wrote, with a checksum (CRC32) of its contents; torch does not
look at it when it reads. Nothing more is written for this. On one core 200 MB take 0.06 s, half of what loading takes.

A disk or a mount that does not answer says nothing about the bytes: that is an error of its own, not a change.
"""

from __future__ import annotations

import errno
import io
import json
import pickle
import socket
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from egmla_megatron.checkpoint.stored import Window
from egmla_megatron.errors import MachineError, UserError
from egmla_megatron.parallel.together import together
from egmla_megatron.parallel.world import World

__all__ = [
    "Changed",
    "changed_pieces",
    "describe_changed",
    "find_changed",
    "refuse_changed",
    "still_changed",
    "unreadable",
]

# what changed bytes do to a reader of zip archives, besides a wrong checksum, and to one of pickles
_BROKEN_ARCHIVE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, OverflowError, RuntimeError)
_BROKEN_PICKLE = (
    *(pickle.UnpicklingError, EOFError, ValueError, OverflowError, RuntimeError),
    *(AttributeError, LookupError, ImportError, TypeError),
)
_METADATA = ".metadata"


@dataclass(frozen=True)
class Changed:
    """A piece that is not as it was written, and who saw it."""

    name: str  # of the file in the checkpoint's folder
    start: int  # in it, bytes
    length: int  # bytes
    rank: int
    host: str


def changed_pieces(folder: Path, share: int = 0, shares: int = 1) -> list[Changed]:
    """The changed pieces in the part `share` of `shares` of a complete checkpoint, as rank `share` of them saw it.

    A `.metadata` that makes no sense counts as one.

    Raises:
        OSError: something could not be read at all.
    """
    host = socket.gethostname()
    places = _places(folder)
    if places is None:
        return [Changed(_METADATA, 0, 0, share, host)]
    return [Changed(*place, share, host) for place in places[share::shares] if not _whole(folder, *place)]


def _places(folder: Path) -> list[tuple[str, int, int]] | None:
    """(file, start, bytes) of every piece; None: what says so is changed."""
    try:
        metadata = dcp.FileSystemReader(str(folder)).read_metadata()
        places = sorted({(place.relative_path, place.offset, place.length) for place in metadata.storage_data.values()})
    except _BROKEN_PICKLE:
        return None
    manifest = folder / "manifest.json"
    if manifest.is_file():  # a changed name is no missing file
        files = json.loads(manifest.read_bytes())["files"]
        if any(name not in files for name, _, _ in places):
            return None
    return places


class _Watched(Window):
    """Remembers what the disk answered: readers of archives take that for a broken archive."""

    failure: OSError | None = None

    def readinto(self, buffer: Any) -> int:
        try:
            return super().readinto(buffer)
        except OSError as error:
            self.failure = error
            raise


def _whole(folder: Path, name: str, start: int, length: int) -> bool:
    path = folder / name
    with open(path, "rb") as file:
        window = _Watched(file, start, length)
        try:
            with zipfile.ZipFile(io.BufferedReader(window, buffer_size=1 << 20)) as archive:
                return archive.testzip() is None
        except _BROKEN_ARCHIVE:
            if window.failure is not None:
                failure = window.failure
                raise OSError(failure.errno, failure.strerror, str(path)) from failure
            return False


def still_changed(folder: Path, found: Sequence[Changed]) -> bool:
    """Whether this process sees the change of any of these pieces, too. Raises OSError as `changed_pieces`."""
    return any(
        _places(folder) is None if each.name == _METADATA else not _whole(folder, each.name, each.start, each.length)
        for each in found
    )


def find_changed(folder: Path, world: World) -> list[Changed]:
    """Look at every piece, each rank at its share: what all of them found, the same on every rank. Called by every
    rank.

    Raises:
        UserError: on every rank, where one of them could not read.
    """
    mine = together(world, lambda: _look(folder, world))
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, mine, group=world.control)
    return [each for some in found for each in some]


def _look(folder: Path, world: World) -> list[Changed]:
    try:
        return changed_pieces(folder, world.rank, world.size)
    except OSError as error:
        raise unreadable(folder, world.rank, error) from error


def unreadable(folder: Path, rank: int, error: OSError) -> MachineError:
    """What to say about a disk that does not answer."""
    code = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return MachineError(
        f"checkpoint: rank {rank} on {socket.gethostname()} cannot read {error.filename or folder} ({code}: "
        f"{error.strerror or error}), which says nothing about the checkpoint: nothing was marked; mend the disk or "
        "the mount of that node or leave the node out, then start again"
    )


def describe_changed(found: Sequence[Changed]) -> str:
    """In words."""
    names = sorted({each.name for each in found})
    return f"{', '.join(names[:4])}: {len(names)} files with {len(found)} pieces that are not as they were written"


def refuse_changed(folder: Path, world: World) -> None:
    """Called by every rank.

    Raises:
        UserError: on every rank, where one of them found something or could not read.
    """
    found = find_changed(folder, world)
    if found:
        raise UserError(
            f"checkpoint: {folder} is damaged ({describe_changed(found)}), allowed one that is whole; give another "
            "one, or put back a copy (checkpoint.verify=false: the trainer loads it as it is)"
        )

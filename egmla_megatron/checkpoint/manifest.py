"""What a checkpoint folder says about itself, and which folders are complete.

RUN_DIR/checkpoints/step_00000040/ holds megatron-core's distributed checkpoint, `manifest.json`, and, written
last, `COMPLETE`. A save in progress is called step_00000040.incomplete until then. A complete one whose bytes were
found changed gets the file `DAMAGED`, with the reason in it: from then on it counts as damaged for every reader.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from egmla_megatron.environment import whole_number
from egmla_megatron.errors import UserError

__all__ = [
    "NONE",
    "Manifest",
    "checkpoint_path",
    "complete_checkpoints",
    "damage_of",
    "damaged_checkpoints",
    "describe_damaged",
    "find_checkpoint",
    "is_complete",
    "mark_complete",
    "mark_damaged",
    "passed_over",
    "read_manifest",
    "seal",
    "step_of",
    "warn_of",
    "warn_of_passed_over",
]

FORMAT = 1
MARKER = "COMPLETE"
DAMAGED = "DAMAGED"
NAME = re.compile(r"^step_(\d{8,})$")
NONE: Mapping[Path, str] = MappingProxyType({})  # no checkpoints


@dataclass(frozen=True)
class Manifest:
    """Everything needed to decide whether and how a checkpoint can be continued."""

    format: int
    step: int  # optimizer steps done
    consumed_samples: int  # sequences
    consumed_tokens: int
    architecture: dict[str, Any]  # see config.architecture
    config: dict[str, Any]  # the whole configuration of the run
    layout: dict[str, int]
    data_fingerprint: str
    distributed_optimizer: bool
    implementation: str  # te or torch
    versions: dict[str, str]
    written_unix_s: float
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes of every data file, to notice a cut one
    weights_only: bool = False  # converted: no optimizer, no random generators, no position in data


def checkpoint_path(root: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` optimizer steps."""
    return root / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Step in a checkpoint folder's name; -1 for any other folder."""
    match = NAME.match(path.name)
    return int(match.group(1)) if match else -1


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write manifest.json into the folder `path` and flush it to disk."""
    _write_synced(path / "manifest.json", json.dumps(asdict(manifest), indent=1))


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def mark_complete(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Manifest and marker, then the rename that makes the checkpoint visible."""
    seal(temporary, manifest)
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    _sync(final.parent)


def seal(temporary: Path, manifest: Manifest) -> None:
    """Makes a folder of data files a complete checkpoint: manifest, then marker with the manifest's checksum."""
    files = {path.name: path.stat().st_size for path in temporary.iterdir() if path.is_file()}
    for name in files:  # megatron-core flushes its data files, but not metadata.json and its like
        _sync(temporary / name)
    write_manifest(temporary, replace(manifest, files=files))
    digest = hashlib.sha256((temporary / "manifest.json").read_bytes()).hexdigest()
    _write_synced(temporary / MARKER, digest)
    _sync(temporary)


def mark_damaged(path: Path, why: str) -> None:
    """Let no start and no other reader take this checkpoint for whole again, until a person puts back a copy and
    deletes the file.

    Raises:
        OSError: the folder cannot be written; nothing is left in it.
    """
    temporary = path / f"{DAMAGED}.tmp"
    try:
        _write_synced(temporary, f"{why}; after putting back a copy delete the file {DAMAGED}")
        os.replace(temporary, path / DAMAGED)
    except OSError:
        with suppress(OSError):  # the first reason is the one to tell
            temporary.unlink(missing_ok=True)
        raise
    _sync(path)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage_of(path: Path) -> str:
    """Why a checkpoint folder cannot be used, in a few words; empty: the marker belongs to the manifest, and every data
    file has the size that the manifest says, and nobody has marked it."""
    try:
        return _damage_of(path)
    except OSError as error:
        return f"{error.filename or path} cannot be read ({error.strerror})"


def _damage_of(path: Path) -> str:
    if (path / DAMAGED).is_file():
        return (path / DAMAGED).read_text(errors="replace").strip() or f"{DAMAGED} is there"
    for name in (MARKER, "manifest.json"):
        if not (path / name).is_file():
            return f"{name} is missing"
    content = (path / "manifest.json").read_bytes()
    if (path / MARKER).read_bytes().strip() != hashlib.sha256(content).hexdigest().encode():
        return f"manifest.json is not the one that {MARKER} was written for"
    files: dict[str, int] = json.loads(content).get("files", {})
    for name, size in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        found = (path / name).stat().st_size
        if found != size:
            return f"{name} has {found:,} bytes of {size:,}"
    return ""


def is_complete(path: Path) -> bool:
    """True when `damage_of` finds nothing."""
    return not damage_of(path)


def _examined(root: Path, unmarked: Mapping[Path, str]) -> dict[Path, str]:
    """What has a checkpoint's name, oldest first, with its damage; empty: it is complete. Every data file of every
    checkpoint is looked up for this."""
    if not root.is_dir():
        return {}
    paths = sorted((path for path in root.iterdir() if step_of(path) >= 0), key=step_of)
    return {path: damage_of(path) or unmarked.get(path, "") for path in paths}


def damaged_checkpoints(root: Path, unmarked: Mapping[Path, str] = NONE) -> dict[Path, str]:
    """What has a checkpoint's name and cannot be used, oldest first, with the reason. A save that was cut off has
    another name and is not meant.

    Args:
        unmarked: those whose bytes changed, with the reason, but which could not be marked.
    """
    return {path: why for path, why in _examined(root, unmarked).items() if why}


def complete_checkpoints(root: Path, unmarked: Mapping[Path, str] = NONE) -> list[Path]:
    """Complete checkpoints of a run, oldest first; half-written ones and `unmarked` are passed over."""
    return [path for path, why in _examined(root, unmarked).items() if not why]


def passed_over(root: Path, unmarked: Mapping[Path, str] = NONE) -> dict[Path, str]:
    """Damaged checkpoints newer than the newest complete one, with the reasons."""
    found: dict[Path, str] = {}
    for path, why in reversed(_examined(root, unmarked).items()):
        if not why:
            break
        found[path] = why
    return dict(reversed(found.items()))


def warn_of_passed_over(root: Path) -> None:
    """Name on stderr every checkpoint that is left out although it is newer than the one in use; rank 0 speaks."""
    if whole_number("RANK", 0, 0):
        return
    for path, why in passed_over(root).items():
        warn_of(path, why)


def warn_of(path: Path, why: str) -> None:
    """Name a checkpoint that is passed over, on stderr."""
    print(f"warning: checkpoint: {path} is damaged and passed over ({why})", file=sys.stderr, flush=True)


def describe_damaged(damaged: Mapping[Path, str]) -> str:
    """The newest of them in words, how many there are."""
    path, why = list(damaged.items())[-1]
    if len(damaged) == 1:
        return f"{path} is damaged ({why})"
    return f"all {len(damaged)} checkpoints in {path.parent} are damaged (the newest, {path.name}: {why})"


def find_checkpoint(where: Path, *, warn: bool = True) -> Path:
    """A checkpoint folder itself, or the newest complete checkpoint of a run folder or checkpoints folder.

    Args:
        warn: of damaged ones that are newer, on stderr.

    Raises:
        UserError: nothing complete is there.
    """
    if is_complete(where):
        return where
    for root in (where, where / "checkpoints"):
        found = complete_checkpoints(root)
        if found:
            if warn:
                warn_of_passed_over(root)
            return found[-1]
    if not where.exists():
        raise UserError(f"checkpoint: {where} does not exist; give a run folder or a checkpoints/step_* folder")
    damaged = {**damaged_checkpoints(where), **damaged_checkpoints(where / "checkpoints")}
    if (where / MARKER).is_file():
        damaged[where] = damage_of(where)
    if damaged:
        raise UserError(f"checkpoint: {describe_damaged(damaged)}; give another run or checkpoints/step_* folder")
    if (where / "config.json").is_file():
        raise UserError(
            f"checkpoint: {where} is a Hugging Face folder; make a checkpoint of it with tools/convert_checkpoint.py "
            "from-hf, and give that"
        )
    raise UserError(
        f"checkpoint: {where} holds no complete checkpoint (marker {MARKER} and file sizes as manifest.json says); "
        "give a run folder or a checkpoints/step_* folder"
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        UserError: incomplete, unreadable, or written by a newer version.
    """
    damage = damage_of(path)
    if damage:
        raise UserError(f"checkpoint: {path} is not complete ({damage}); use another step_* folder of the run")
    data = json.loads((path / "manifest.json").read_text())
    if data.get("format") != FORMAT:
        raise UserError(f"checkpoint: {path} has format {data.get('format')}, this version reads {FORMAT}; update")
    return Manifest(**data)

"""What a checkpoint folder says about itself, and which folders are complete.

RUN_DIR/checkpoints/step_00000040/ holds megatron-core's distributed checkpoint, `manifest.json`, and, written
last, `COMPLETE`. A save in progress is called step_00000040.incomplete until then.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from egmla_megatron.errors import UserError

__all__ = [
    "Manifest",
    "checkpoint_path",
    "complete_checkpoints",
    "find_checkpoint",
    "is_complete",
    "mark_complete",
    "prune",
    "read_manifest",
    "seal",
    "step_of",
]

FORMAT = 1
MARKER = "COMPLETE"
NAME = re.compile(r"^step_(\d{8,})$")


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


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(path: Path) -> bool:
    """True when the marker belongs to the manifest and every data file has the size that the manifest says."""
    marker, manifest = path / MARKER, path / "manifest.json"
    if not (marker.is_file() and manifest.is_file()):
        return False
    content = manifest.read_bytes()
    if marker.read_text().strip() != hashlib.sha256(content).hexdigest():
        return False
    files: dict[str, int] = json.loads(content).get("files", {})
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, size in files.items())


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first; half-written ones are passed over."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if step_of(path) >= 0 and is_complete(path)]
    return sorted(found, key=step_of)


def find_checkpoint(where: Path) -> Path:
    """A checkpoint folder itself, or the newest complete checkpoint of a run folder or checkpoints folder.

    Raises:
        UserError: nothing complete is there.
    """
    if is_complete(where):
        return where
    for root in (where, where / "checkpoints"):
        found = complete_checkpoints(root)
        if found:
            return found[-1]
    if not where.exists():
        raise UserError(f"checkpoint: {where} does not exist; give a run folder or a checkpoints/step_* folder")
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
    if not is_complete(path):
        raise UserError(f"checkpoint: {path} is not complete; use another step_* folder of the run")
    data = json.loads((path / "manifest.json").read_text())
    if data.get("format") != FORMAT:
        raise UserError(f"checkpoint: {path} has format {data.get('format')}, this version reads {FORMAT}; update")
    return Manifest(**data)


def prune(root: Path, keep: int, keep_every_steps: int) -> list[Path]:
    """Delete all but the newest `keep` complete checkpoints (0: delete none) and those at multiples of
    `keep_every_steps`; also left-overs of interrupted saves and deletions older than the newest. Returns what went."""
    complete = complete_checkpoints(root)
    old = complete[:-keep] if keep else []
    gone = [path for path in old if not (keep_every_steps and step_of(path) % keep_every_steps == 0)]
    for path in gone:
        (path / MARKER).unlink()  # first, so that a half-deleted folder is never taken for whole
        shutil.rmtree(path)
    for path in root.glob("step_*"):
        unfinished = path.suffix == ".incomplete"  # a save that a crash interrupted
        half_deleted = step_of(path) >= 0 and not (path / MARKER).exists()
        if complete and (unfinished or half_deleted) and step_of(path.with_suffix("")) < step_of(complete[-1]):
            shutil.rmtree(path)
    return gone

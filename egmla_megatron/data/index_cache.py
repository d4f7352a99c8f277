"""Folders of sample indices that are whole or not there: safe against kills, two jobs at once and replaced data.

megatron-core writes its index files one after the other under their final names and takes a file that exists for a
complete one. So rank 0 lets it write into a folder of another name, under a lock, and renames that when all is there. A
folder's name holds the identity of the data, so indices of files that were replaced since are never read.

On disks that only one node sees, megatron-core's rank 0 can build for its own node alone; there one process per node
builds outside of the process group first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from egmla_megatron.errors import UserError

__all__ = ["cache_key", "helper_command", "index_folder"]

# What makes a process a member of a job; a helper that builds alone must not see them.
_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")


def cache_key(prefixes: Sequence[str], facts: Sequence[Any]) -> str:
    """Identifies the indices: `facts` that decide them, and size and time of change of the data sets."""
    files = []
    for prefix in prefixes:
        index = Path(f"{prefix}.idx").stat()
        files.append([prefix, index.st_size, index.st_mtime_ns, Path(f"{prefix}.bin").stat().st_size])
    return hashlib.sha256(json.dumps([files, list(facts)]).encode()).hexdigest()[:24]


@contextmanager
def index_folder(base: Path, key: str, alone: Callable[[Path], Sequence[str]]) -> Iterator[Path]:
    """The folder to hand to megatron-core as path_to_cache; every rank enters and builds inside.

    base: the cache, on a disk that all nodes share or on one of each node's own. alone: the command that builds the
    indices into a folder without a process group, for nodes that do not see rank 0's disk.

    Raises:
        UserError: the cache cannot be written.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    final = base / key
    try:
        base.mkdir(parents=True, exist_ok=True)
        lock = (base / f"{key}.lock").open("w") if rank == 0 else None
    except OSError as error:
        raise UserError(
            f"data.cache_dir: {base} cannot be written ({error.strerror}); set data.cache_dir to a folder that can"
        ) from error
    try:
        name = key
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however it ends
            name = key if final.is_dir() else _fresh(base, key).name
        name = _from_first(name)
        if _everywhere(base, name):
            yield base / name
            _barrier()
            if rank == 0 and name != key:
                (base / name).rename(final)
            return
        if rank == 0 and name != key:
            (base / name).rmdir()
    finally:
        if lock is not None:
            lock.close()
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        _build_alone(base, key, alone)
    _barrier()
    yield final


def _fresh(base: Path, key: str) -> Path:
    """An empty folder to build in. Called under the lock: what is left of earlier tries belongs to nobody."""
    for stale in base.glob(f".{key}.*"):
        shutil.rmtree(stale)
    folder = base / f".{key}.{socket.gethostname()}-{os.getpid()}"
    folder.mkdir()
    return folder


def _build_alone(base: Path, key: str, alone: Callable[[Path], Sequence[str]]) -> None:
    with (base / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (base / key).is_dir():
            return
        folder = _fresh(base, key)
        environment = {name: value for name, value in os.environ.items() if name not in _JOB}
        done = subprocess.run(alone(folder), env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"building sample indices on {socket.gethostname()} failed:\n{done.stderr[-4000:]}")
        folder.rename(base / key)


def _from_first(name: str) -> str:
    """Rank 0's value on every rank."""
    values = [name]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def _everywhere(base: Path, name: str) -> bool:
    """Whether every rank sees the folder."""
    seen = name in {entry.name for entry in base.iterdir()}  # a listing: NFS may remember that a name was not there
    if not dist.is_initialized():
        return seen
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, seen)
    return all(answers)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def helper_command(module: str, *arguments: str) -> list[str]:
    """`python -m module arguments` with this interpreter."""
    return [sys.executable, "-m", module, *arguments]

"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from egmla_megatron.errors import UserError

__all__ = ["new_folder", "require_disk"]

_SPARE_BYTES = 16 * 2**20  # everything but the weights: tokenizer, model code, metadata


def require_disk(target: Path, needed: int) -> None:
    """Refuse to start what will not fit. needed: bytes of the weights. An older `target` stays until the end."""
    existing = next(folder for folder in target.absolute().parents if folder.exists())
    free, needed = shutil.disk_usage(existing).free, needed + _SPARE_BYTES
    if free < needed:
        raise UserError(
            f"{target}: got {free >> 20} MiB free, the result needs {needed >> 20} MiB; free some space or choose "
            "another disk"
        )


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # an exception, so that what was begun is cleaned up


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Gives a folder to write to; it is renamed to `target` when the block ends well and deleted otherwise.

    SIGTERM counts as an error. An older `target` steps aside at the end and is deleted last.
    """
    target = target.resolve()  # a link stays, what it leads to is replaced
    beside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    older = beside.with_name(f".{target.name}.older-{os.getpid()}")
    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere Python sets no handlers
    before = signal.signal(signal.SIGTERM, _end) if in_main_thread else None
    try:
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            yield beside
            if target.exists():
                target.rename(older)
            beside.rename(target)
        except OSError as error:  # the disk filled up or went away in spite of the check
            raise UserError(f"{target}: could not be made ({error}); free space or choose another folder") from error
    finally:
        if older.exists() and not target.exists():
            older.rename(target)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(older, ignore_errors=True)
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)

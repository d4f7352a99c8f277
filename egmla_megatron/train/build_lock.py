"""A build of megatron-core's C++ extension that was killed, and whose lock every later start would wait for, silently.

torch builds an inline extension under a lock file, which it keeps open while it builds and removes afterwards; others
wait until the file is gone. A kill leaves it behind. Selective recomputation needs the extension in its first backward.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = ["ABANDONED_AFTER_S", "clear_abandoned_build", "extension_lock"]

EXTENSION = "share_storage_ext"  # megatron/core/tensor_parallel/random.py
# a build takes about a minute; one on another node of a shared home cannot be seen, only be given time
ABANDONED_AFTER_S = 300.0
_PART_OF_TIMEOUT = 0.5  # of train.collective_timeout_s, which the other ranks' rendezvous has, too
_LOOK_EVERY_S = 0.5


def extension_lock() -> Path:
    """Where torch locks the build of the extension, for this Python and torch; TORCH_EXTENSIONS_DIR moves it."""
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        hip, cuda = torch.version.hip, torch.version.cuda
        card = f"rocm{hip}" if hip is not None else f"cu{cuda}" if cuda is not None else "cpu"
        python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
        root = os.path.join(get_default_build_root(), f"{python}_{card.replace('.', '')}")
    return Path(root, EXTENSION, "lock")


def clear_abandoned_build(cfg: RunConfig, abandoned_after_s: float = ABANDONED_AFTER_S) -> None:
    """Remove, with a warning, the lock of a build that nobody works at. Called by one rank of a node.

    Nobody does where no process of this machine has the file open and it is older than `abandoned_after_s` seconds; a
    younger one is waited for, and said so. The wait ends after a part of `train.collective_timeout_s`, for so long the
    other ranks wait for this one; what is still young then is left where it is.

    Raises:
        UserError: it cannot be removed, or its folder cannot be written.
    """
    if cfg.train.recompute != "selective":
        return
    lock, begun, said = extension_lock(), time.monotonic(), False
    patience_s = _PART_OF_TIMEOUT * cfg.train.collective_timeout_s
    ahead_s = _ahead_s(lock.parent) if lock.exists() else 0.0
    while (age_s := _age_s(lock, ahead_s)) is not None and not _holders(lock):
        waited_s = time.monotonic() - begun
        if max(age_s, waited_s) > abandoned_after_s:
            _remove(lock, age_s)
            return
        if waited_s > patience_s:
            _warn(
                f"{lock} is {age_s:.0f} s old, waited {waited_s:.0f} s; going on: the first backward waits until it is "
                "gone"
            )
            return
        if not said:
            _warn(
                f"{lock} is {age_s:.0f} s old and no process of this machine builds; waiting for another node's build, "
                f"or until the file is {abandoned_after_s:.0f} s old, at most {patience_s:.1f} s"
            )
            said = True
        time.sleep(_LOOK_EVERY_S)


def _warn(text: str) -> None:
    print(f"warning: train.recompute=selective: {text}", file=sys.stderr, flush=True)


def _age_s(lock: Path, ahead_s: float) -> float | None:
    """None: no lock."""
    try:
        return max(0.0, time.time() + ahead_s - lock.stat().st_mtime)
    except FileNotFoundError:
        return None


def _ahead_s(folder: Path) -> float:
    """Seconds by which the clock that dates the files there, a file server's say, is ahead of this machine's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())  # a file server dates what reaches it
            return os.stat(file.fileno()).st_mtime - time.time()
    except FileNotFoundError:  # removed with the lock meanwhile
        return 0.0
    except OSError as error:
        raise UserError(
            f"train.recompute=selective: megatron-core's extension is built in {folder}, which cannot be written "
            f"({error.strerror}); set TORCH_EXTENSIONS_DIR to a folder that can"
        ) from error


def _remove(lock: Path, age_s: float) -> None:
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"train.recompute=selective: {lock} is left from a build that was cut off (it is {age_s:.0f} s old, no "
            f"process has it open) and cannot be removed ({error.strerror}); delete it: every start would wait for it"
        ) from error
    _warn(f"removed {lock}, {age_s:.0f} s old, of a build that was cut off: no process of this machine has it open")


def _holders(lock: Path) -> list[int]:
    """Processes of this machine that have the file open, as far as this user may look (Linux)."""
    try:
        wanted = lock.stat()
    except FileNotFoundError:
        return []
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [f"{process}/fd/{number}" for number in os.listdir(process / "fd")]
        except OSError:  # it ended, or is another user's
            continue
        if any(_is_file(path, wanted) for path in opened):
            found.append(int(process.name))
    return found


def _is_file(opened: str, wanted: os.stat_result) -> bool:
    try:
        return os.readlink(opened).endswith("/lock") and os.path.samestat(os.stat(opened), wanted)
    except OSError:  # closed in between
        return False

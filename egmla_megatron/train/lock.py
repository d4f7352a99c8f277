"""One job at a time in a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

from egmla_megatron.errors import UserError

__all__ = ["is_held", "lock_run_dir"]

WAIT_S = 20.0  # a job that was just killed may need a moment to be gone
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def lock_run_dir(folder: Path, *, wait_s: float = WAIT_S) -> IO[str]:
    """Take RUN_DIR/run.lock for as long as the returned file is open and this process lives. Rank 0 calls it.

    POSIX record locks: they also hold over NFS, helper processes do not inherit them, and no crash leaves one behind.

    Raises:
        UserError: another process holds it; names that process.
    """
    path = folder / "run.lock"
    file = open(path, "a+")  # noqa: SIM115 - stays open as long as the run
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in NO_LOCKS:
                print(f"warning: {folder} is on a disk without file locks; see to it that only one job runs there",
                      file=sys.stderr, flush=True)  # fmt: skip
                return file
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() > deadline:
                raise UserError(
                    f"run.dir: {folder} is in use by {_holder(file)}; stop that job, or choose another run.dir"
                ) from error
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"{socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def is_held(folder: Path) -> bool | None:
    """Whether a job has the folder; None: that cannot be seen (no lock file, not writable, a disk without locks)."""
    try:
        with open(folder / "run.lock", "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back when the file is closed
    except OSError as error:
        return True if error.errno in (errno.EACCES, errno.EAGAIN) and (folder / "run.lock").is_file() else None
    return False


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"

"""What a full, read-only or forbidden disk becomes: one line that names it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from egmla_megatron.errors import UserError

__all__ = ["writing_to"]

_DISK = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}
)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turns the errors of a disk that cannot take more into UserError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        name = error.filename or path
        raise UserError(
            f"{name}: cannot be written ({error.strerror}); free space or choose another --output-prefix, and start "
            "again: finished parts are kept"
        ) from error

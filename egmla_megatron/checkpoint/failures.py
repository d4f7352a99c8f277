"""Which exceptions of a save mean that the disk failed, and which mean something else."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from egmla_megatron.errors import UserError

__all__ = ["SAVE_ERRORS", "raise_unless_disk"]

SAVE_ERRORS: tuple[type[BaseException], ...] = (OSError, CheckpointException, CheckpointingException, RuntimeError)

# torch.save's writer; megatron-core wraps what its writers met in a bare RuntimeError with the text of the cause
OF_THE_DISK = ("PytorchStreamWriter", "OSError", "[Errno ", "No space left", "Disk quota")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it gathered from the ranks."""
    yield error
    if isinstance(error, CheckpointException):
        for cause, _ in error.failures.values():
            yield cause


def raise_unless_disk(error: BaseException) -> None:
    """Raise what has nothing to do with the disk: memory, a lost rank, our fault or the user's. Returns for the rest.

    RuntimeError is what nearly everything in torch raises, memory and lost ranks included.
    """
    for cause in _causes(error):
        if isinstance(cause, AssertionError | UserError):
            raise cause
        if isinstance(cause, RuntimeError) and not any(word in str(cause) for word in OF_THE_DISK):
            raise cause

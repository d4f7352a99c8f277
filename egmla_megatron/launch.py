"""torchrun with the manners of a command line: `python -m egmla_megatron.launch [torchrun options] -m MODULE ...`.

torchrun itself gives workers 30 s after Ctrl-C or SIGTERM, too little for a large checkpoint, swallows SIGUSR1,
and ends every failure with a traceback and exit code 1. This passes SIGINT, SIGTERM and SIGUSR1 on and waits for
the workers to save and end; its exit code is that of the worker that failed first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import psutil  # not in the handler: a second signal would find it half imported

from egmla_megatron.parallel.child_processes import STOP_SIGNALS

__all__ = ["main"]


class _Forwarder:
    """Passes a signal on to the workers."""

    def __init__(self) -> None:
        self.had_workers = False
        self.last = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.last = number
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it may end at any moment
                if "egmla_megatron.launch" not in " ".join(child.cmdline()):
                    child.send_signal(number)
                    self.had_workers = True
        if not self.had_workers:  # still starting: nobody would remember the signal
            raise SystemExit(128 + number)


def _exit_code(failures: dict[int, object]) -> int:
    """Name ranks that a signal killed (a worker that could, spoke itself); exit code of the first failure."""
    for failure in failures.values():  # a killed worker leaves its checkpoint writers behind, in its own group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(failure.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    first = min(failures.values(), key=lambda failure: failure.timestamp)  # type: ignore[attr-defined]
    code: int = first.exitcode  # type: ignore[attr-defined]
    if code >= 0:
        return code
    rank = next(rank for rank, failure in failures.items() if failure is first)
    name = signal.Signals(-code).name
    print(f"error: rank {rank} (pid {first.pid}) was killed by {name}", file=sys.stderr)  # type: ignore[attr-defined]
    return 1


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def main(argv: Sequence[str]) -> int:
    """Launch; returns the exit code. Options are torchrun's."""
    import logging

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns, with a stack, of every launcher that ended first
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what failed is said below, and by the workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its banner
    arguments = parse_args(list(argv))
    arguments.signals_to_handle = "SIGHUP,SIGQUIT"
    forward = _Forwarder()
    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    try:
        run(arguments)
    except ChildFailedError as error:
        return _exit_code(dict(error.failures))
    except RendezvousError as error:  # the first node's launcher hosts the rendezvous
        if forward.last:
            return 128 + forward.last
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"error: {_node()}: the first node's launcher ended or cannot be reached ({reason})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # during the imports
        sys.exit(128 + signal.SIGINT)

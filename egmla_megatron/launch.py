"""torchrun with the manners of a command line: `python -m egmla_megatron.launch [torchrun options] -m MODULE ...`.

torchrun itself gives workers 30 s after Ctrl-C or SIGTERM, too little for a large checkpoint, swallows SIGUSR1,
and ends every failure with a traceback and exit code 1. This passes the stop signals on (SIGINT, SIGTERM, SIGUSR1,
SIGHUP, SIGQUIT) and waits for the workers to save and end; its exit code is that of the worker that failed first, or
128 + the signal where that ended workers which were not yet ready to save.
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

from egmla_megatron.parallel.child_processes import catch_stop_signals

__all__ = ["main"]


class _Forwarder:
    """Passes a signal on to the workers."""

    def __init__(self) -> None:
        self.had_workers = False
        self.received: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.received.append(number)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it may end at any moment
                if "egmla_megatron.launch" not in " ".join(child.cmdline()):
                    child.send_signal(number)
                    self.had_workers = True
        if not self.had_workers:  # still starting: nobody would remember the signal
            raise SystemExit(128 + number)


def _exit_code(failures: dict[int, object], received: Sequence[int]) -> int:
    """Name ranks that a signal killed (a worker that could, spoke itself); exit code of the first failure.

    Args:
        received: signals that were passed on. One that ended a worker found it starting, with nothing to save; the
            others then fail for the loss of it, and may be noticed first.
    """
    for failure in failures.values():  # a killed worker leaves its checkpoint writers behind, in its own group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(failure.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    codes = {failure.exitcode for failure in failures.values()}  # type: ignore[attr-defined]
    for number in received:
        if -number in codes or (number == signal.SIGINT and 128 + number in codes):
            if -number in codes:
                name = signal.Signals(number).name
                when = " before training began" if len(received) == 1 else f", the last of {len(received)} signals"
                _say(f"stopped by {name}{when}; start again to resume")
            return 128 + number
    first = min(failures.values(), key=lambda failure: failure.timestamp)  # type: ignore[attr-defined]
    code: int = first.exitcode  # type: ignore[attr-defined]
    if code >= 0:
        return code
    rank = next(rank for rank, failure in failures.items() if failure is first)
    name = signal.Signals(-code).name
    _say(f"error: rank {rank} (pid {first.pid}) was killed by {name}")  # type: ignore[attr-defined]
    return 1


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(text, file=sys.stderr, flush=True)


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
    arguments.signals_to_handle = "SIGXCPU"  # it must handle one; the others are ours
    forward = _Forwarder()
    catch_stop_signals(forward)
    try:
        run(arguments)
    except ChildFailedError as error:
        return _exit_code(dict(error.failures), forward.received)
    except RendezvousError as error:  # the first node's launcher hosts the rendezvous
        if forward.received:
            return 128 + forward.received[-1]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        _say(f"error: {_node()}: the first node's launcher ended or cannot be reached ({reason})")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # during the imports
        sys.exit(128 + signal.SIGINT)

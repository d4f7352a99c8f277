"""What a rank's helper processes inherit: no stop signals, and their parent's end."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

__all__ = ["STOP_SIGNALS", "catch_stop_signals", "deaf_children", "end_with", "kill_children", "stop_with_launcher"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def catch_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Calls `handler` for every stop signal from now on, except SIGHUP where nohup says to ignore it.

    Called again, it takes back what other libraries have put into its place without Python's knowledge.
    """
    for number in STOP_SIGNALS:
        ignored = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
        signal.signal(number, signal.SIG_IGN if ignored else handler)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started inside do not see stop signals.

    Slurm signals every process of a job, and Ctrl-C every process of a terminal: loader workers and checkpoint
    writers must outlive it, or the rank has nothing left to save with. Signals to this process are only held back
    until the end of the block. Helpers still end when this process does, or when it closes them.
    """
    atexit.unregister(_kill_daemons)
    atexit.register(_kill_daemons)  # last in, first out: before multiprocessing waits for them
    unknown = set(STOP_SIGNALS) - {signal.SIGINT, signal.SIGTERM}  # to the tracker, which ignores those two
    before = signal.pthread_sigmask(signal.SIG_BLOCK, unknown)
    resource_tracker.ensure_running()  # otherwise the first child starts it, which unblocks signals on the way
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill_daemons() -> None:
    """At exit multiprocessing sends its daemons SIGTERM, which they do not see, and waits for them for ever."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def kill_children() -> None:
    """End every helper now, before an os._exit that would leave them behind."""
    for child in multiprocessing.active_children():
        child.kill()


def stop_with_launcher() -> None:
    """Ask the kernel for SIGTERM when the launcher of this rank dies (Linux; elsewhere nothing).

    Several ranks notice through the launcher's rendezvous store; a single one would train on unseen, and a second
    start in the same folder would find it there. Nothing is asked for outside a launcher: a run that was started in
    a shell may outlive it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())


def end_with(parent: int, number: int = signal.SIGTERM) -> None:
    """Ask the kernel for signal `number` when this process's parent dies (Linux; elsewhere nothing)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), number)

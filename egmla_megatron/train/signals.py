"""Stop requests: caught once per process, agreed on by all ranks once per step."""

from __future__ import annotations

import signal
import time
from types import FrameType

from egmla_megatron.parallel.child_processes import catch_stop_signals

__all__ = ["StopRequest"]

ONE_SIGNAL_S = 2.0  # Slurm signals the launcher and the ranks, and the launcher passes it on: that is one request


class StopRequest:
    """Remembers the first stop signal; a second Ctrl-C, some time after the first, interrupts at once.

    SIGUSR1 is what `sbatch --signal=USR1@120` sends before the time limit, SIGTERM what preemption and torchrun send,
    SIGINT is Ctrl-C, SIGQUIT Ctrl-\\, SIGHUP a terminal that is closed (nohup: ignored). torchrun and srun forward none
    of them unless a process handles them.
    """

    def __init__(self) -> None:
        self.received = 0  # signal number, 0: none
        self.at = 0.0  # when, by the monotonic clock
        self.catch()

    def catch(self) -> None:
        """Takes the signals, before every step: LLVM, which compiles Triton's kernels in the first, puts handlers of
        its own into their place without a word."""
        catch_stop_signals(self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self.at = number, time.monotonic()
        elif number == signal.SIGINT == self.received and time.monotonic() - self.at > ONE_SIGNAL_S:
            raise KeyboardInterrupt

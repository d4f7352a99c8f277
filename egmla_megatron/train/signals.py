"""Stop requests: caught once per process, agreed on by all ranks once per step."""

from __future__ import annotations

import signal
from types import FrameType

from egmla_megatron.parallel.child_processes import STOP_SIGNALS

__all__ = ["StopRequest"]


class StopRequest:
    """Remembers the first stop signal; a second Ctrl-C interrupts at once.

    SIGUSR1 is what `sbatch --signal=USR1@120` sends before the time limit, SIGTERM what preemption and
    torchrun send, SIGINT is Ctrl-C. torchrun and srun forward none of them unless a process handles them.
    """

    def __init__(self) -> None:
        self.received = 0  # signal number, 0: none
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT == self.received:
            raise KeyboardInterrupt
        self.received = self.received or number

"""The trainer whose steps seem to go on when they were launched, as on a GPU where the device decides updates.

late_worker.py CONFIG [section.key=value ...]. LATE_STOP_AT: the launch in which the process gets SIGTERM. LATE_WRITING:
a checkpoint seems to be written all the time. LATE_BAD: launches whose gradients seem to be not finite. Prints the most steps that were under way at once.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from typing import Any

if __name__ == "__main__":
    from unittest import mock

    from egmla_megatron.checkpoint.save import Saver
    from egmla_megatron.train import loop
    from egmla_megatron.train.main import main
    from egmla_megatron.train.step import StepInFlight, StepResult

    launch_step = loop.launch_step
    stop_at, writing = int(os.environ.get("LATE_STOP_AT", "0")), "LATE_WRITING" in os.environ
    bad = [int(number) for number in os.environ.get("LATE_BAD", "").split()]
    launched, open_at_once = 0, [0]

    class Late:
        """A step that has ended, and does not say so before it is asked for its result."""

        finished = False

        def __init__(self, work: StepInFlight) -> None:
            self.work, self.number = work, launched
            open_at_once.append(open_at_once[-1] + 1)

        def result(self) -> StepResult:
            open_at_once.append(open_at_once[-1] - 1)
            result = self.work.result()
            return replace(result, applied=False) if self.number in bad else result

    def launch_late(*args: Any, **kwargs: Any) -> Late:
        global launched
        launched += 1
        if launched == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return Late(launch_step(*args, **kwargs))

    with mock.patch.object(loop, "launch_step", launch_late), mock.patch.object(Saver, "writing", writing):
        code = main(sys.argv[1:])
    print(f"at once {max(open_at_once)}", flush=True)
    sys.exit(code)

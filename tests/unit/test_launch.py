"""What the launcher's exit code says, and which signals a process catches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from egmla_megatron.launch import _exit_code
from egmla_megatron.parallel.child_processes import STOP_SIGNALS


def failures(*codes: int) -> dict[int, object]:
    """Of ranks 0, 1, ... that ended with these codes, noticed in this order; of no process that is there."""
    return {
        rank: SimpleNamespace(exitcode=code, pid=2**22 + 1 + rank, timestamp=100 + rank)
        for rank, code in enumerate(codes)
    }


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_was_passed_on_to_starting_ranks_is_the_end(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(failures(-number, -number), [number]) == 128 + number
    assert _exit_code(failures(1, -number), [signal.SIGUSR1, number]) == 128 + number  # rank 0 lost rank 1
    said = capsys.readouterr().err.splitlines()
    name = signal.Signals(number).name
    assert said[0].startswith(f"stopped by {name} before training began")
    assert said[1].startswith(f"stopped by {name}, the last of 2 signals") and len(said) == 2


def test_a_second_signal_ends_a_rank_that_was_stopping(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(failures(-15, -15), [signal.SIGTERM, signal.SIGTERM]) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM, the last of 2 signals; start again" in capsys.readouterr().err


def test_ctrl_c_while_a_rank_imports(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(failures(1, 130), [signal.SIGINT]) == 130


@pytest.mark.parametrize(
    ("codes", "received", "code", "said"),
    [
        ((-15, 1), [], 1, "error: rank 0 (pid 4194305) was killed by SIGTERM"),  # nobody asked the launcher
        ((-9, -9), [signal.SIGTERM], 1, "was killed by SIGKILL"),
        ((-11, 143), [signal.SIGTERM], 1, "was killed by SIGSEGV"),
        ((143, 143), [signal.SIGTERM], 143, ""),  # saved
        ((2, 143), [signal.SIGTERM], 2, ""),  # one could not save
        ((2, 2), [], 2, ""),
    ],
)
def test_other_ends_are_what_they_were(
    codes: tuple[int, ...], received: list[int], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(failures(*codes), received) == code
    err = capsys.readouterr().err
    assert said in err and (bool(said) or not err)


CAUGHT = """
import signal
from egmla_megatron.parallel.child_processes import STOP_SIGNALS, catch_stop_signals
for _ in range(2):
    catch_stop_signals(lambda number, frame: None)
print([number.name for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN])
"""


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP,), (signal.SIGINT, signal.SIGQUIT)])
def test_nohup_is_respected_and_a_background_job_hears_the_rest(ignored: tuple[signal.Signals, ...]) -> None:
    """A shell starts a background job with SIGINT and SIGQUIT ignored, nohup a command with SIGHUP."""

    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # the tests' own shell may ignore some
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    done = subprocess.run(
        [sys.executable, "-c", CAUGHT], capture_output=True, text=True, preexec_fn=ignore, env=os.environ, check=True
    )
    assert done.stdout.strip() == str(["SIGHUP"] if signal.SIGHUP in ignored else [])

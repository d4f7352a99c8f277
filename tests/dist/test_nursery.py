"""A warm start is a cold one in all that a job can see; a rank that fails ends the others; nothing forks beside threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import ROOT, environment, start

pytestmark = [pytest.mark.dist, pytest.mark.timeout(100)]
FACTS = """
import json, os, signal, sys, threading
print(json.dumps({
    "python": [__name__, __file__, sys.argv, sys.path[:2], sys.warnoptions, threading.active_count()],
    "environment": [os.getcwd(), os.umask(0), sorted(os.environ.items())],
    "signals": [str(signal.getsignal(n)) for n in range(1, 18)] + sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "alone": os.getpid() == os.getsid(0) == os.getpgrp(),
    "input": sys.stdin.read(),
}))
sys.exit(int(sys.argv[1]))
"""
ONE_FAILS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"rank {os.environ['RANK']} was told to end"))
if os.environ["RANK"] == "1":
    raise ValueError("of rank 1")
time.sleep(1000)
"""
TWO_THREADS = """
import threading
from tests.dist.nursery import fork
threading.Thread(target=threading.Event().wait, daemon=True).start()
fork()
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_same_surroundings_and_exit_code(tmp_path: Path, code: int) -> None:
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    found = []
    for warm in (False, True):
        job = start(1, [str(script), str(code)], tmp_path / "log", warm=warm, EXTRA="1")
        assert job.wait() == code
        found.append(json.loads(job.output))
    assert found[0] == found[1] and found[0]["alone"]


@pytest.mark.parametrize("warm", [False, True])
def test_a_job_that_has_ended_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool) -> None:
    script = tmp_path / "nothing.py"
    script.touch()
    job = start(1, [str(script)], tmp_path / "log", warm=warm)
    job.succeed()
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    job.kill()
    assert killed == []


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "one_fails.py"
    script.write_text(ONE_FAILS)
    job = start(2, [str(script)], tmp_path / "log", warm=True)
    assert job.wait() == 1
    assert "ValueError: of rank 1" in job.output and "exit code 1, the other ranks are ended" in job.output
    assert "rank 0 was told to end" in job.output


def test_nothing_forks_beside_a_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith("2 threads run here, allowed 1")

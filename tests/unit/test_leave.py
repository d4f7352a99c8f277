"""A process that has profiled a GPU ends with everything that others wait for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("code", [0, 143])
def test_exit_functions_run_and_the_code_is_kept(code: int, profiled: bool) -> None:
    script = f"""
import atexit, multiprocessing, sys, time
from egmla_megatron.train.leave import gpu_is_profiled, leave

class Lasts:
    def __del__(self):
        print("unloaded")

kept = Lasts()
if __name__ == "__main__":
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    helper.start()
    atexit.register(lambda: print("exit function"))
    print(helper.pid, end=" ")
    if {profiled}:
        gpu_is_profiled()
    code = leave({code})
    print("goes on", end=" ", flush=True)
    sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    pid, *rest = done.stdout.split(maxsplit=1)
    assert rest == ["exit function\n" if profiled else "goes on exit function\nunloaded\n"]
    found = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
    assert not found or found.startswith("Z")  # helpers do not outlive it


def test_nobody_listens() -> None:
    """A closed pipe changes nothing."""
    script = "from egmla_megatron.train.leave import *; gpu_is_profiled(); print('a' * 10); leave(7)"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=buffered)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 7

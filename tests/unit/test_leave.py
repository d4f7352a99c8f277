"""A process that has profiled a GPU ends with everything that others wait for."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("code", [0, 143])
def test_exit_functions_run_and_the_code_is_kept(code: int) -> None:
    script = f"""
import atexit, multiprocessing, time
from egmla_megatron.train.leave import leave_after_profile

class Lasts:
    def __del__(self):
        print("unloaded")

kept = Lasts()
if __name__ == "__main__":
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    helper.start()
    atexit.register(lambda: print("exit function"))
    print(helper.pid, end=" ")
    leave_after_profile({code})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    pid, *rest = done.stdout.split(maxsplit=1)
    assert rest == ["exit function\n"]
    found = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
    assert not found or found.startswith("Z")  # helpers do not outlive it

"""A preprocessing run in its own process that is hit by something: `python preprocess_driver.py WHAT OUT INPUT...`"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from egmla_megatron.cli import run_main
from egmla_megatron.preprocess import command, plan
from egmla_megatron.preprocess.command import preprocess
from egmla_megatron.preprocess.options import Options

PART_BYTES = 20_000
WORKERS = {"kill": 1, "kill while merging": 1}  # others: 2


def workers() -> list[psutil.Process]:
    """The worker processes of this run."""
    return [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


struck: list[str] = []


def strike(what: str, out: str) -> None:
    """Hits this run once: itself (its workers' ids go to OUT.workers), or one of its workers."""
    if struck:
        return
    struck.append(what)
    if what == "kill with workers":
        Path(f"{out}.workers").write_text(" ".join(str(worker.pid) for worker in workers()))
    if what in ("kill", "kill while merging", "kill with workers"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill worker":
        workers()[0].kill()


def kill_starting_worker() -> None:
    """Kills the first worker as soon as there is one, long before it can read anything."""
    while not (found := workers()):
        pass
    found[0].kill()


def main() -> None:
    what, out, *inputs = sys.argv[1:]
    plan._MIN_PART = PART_BYTES  # type: ignore[misc]
    convert, merge = command.convert_parts, command.merge_parts

    def convert_and_strike(chosen: Any, numbers: Any, folder: Path, workers: int, report: Any) -> None:
        def hit(number: int, done: int, tokens: int) -> None:
            report(number, done, tokens)
            if sum(1 for _ in folder.glob("*[0-9].json")) >= 2 and what != "kill while merging":
                strike(what, out)

        if what == "kill starting worker":
            chosen.facts["padding"] = "x" * 2**20  # more than a pipe holds
            threading.Thread(target=kill_starting_worker).start()
        if what == "bug":
            chosen.sources[0].__dict__["column"] = "gone"  # what only a bug would do
        convert(chosen, numbers, folder, workers, hit)

    def merge_and_strike(chosen: Any, options: Any, folder: Path, skipped: Any, progress: Any) -> Any:
        def hit(count: int) -> None:
            progress(count)
            if what == "kill while merging":
                strike(what, out)

        return merge(chosen, options, folder, skipped, hit)

    command.convert_parts, command.merge_parts = convert_and_strike, merge_and_strike
    options = Options(
        inputs=tuple(inputs),
        output=Path(out),
        vocab_size=100,
        eos_id=99,
        workers=WORKERS.get(what, 2),
        validation_fraction=0.1,
    )
    preprocess(options)


if __name__ == "__main__":
    run_main(main)

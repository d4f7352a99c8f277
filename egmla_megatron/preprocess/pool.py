"""Worker processes that convert parts. A worker that dies or fails ends the run; nothing waits for it.

Own code because the standard pools hide how a worker died, and `multiprocessing.Pool` waits for ever when one is
killed.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from egmla_megatron.errors import UserError
from egmla_megatron.preprocess.encode import Encoder
from egmla_megatron.preprocess.part import Report, write_part
from egmla_megatron.preprocess.plan import Plan
from egmla_megatron.preprocess.threads import convert_here

__all__ = ["WorkerDiedError", "convert_parts"]

_REPORT_S = 0.2  # seconds between reports of a worker
_TERMINATE_S = 5.0  # seconds a worker gets to end


class WorkerDiedError(Exception):
    """A worker ended without finishing its part. The message has its exit code, or its traceback."""


def convert_parts(plan: Plan, numbers: Sequence[int], folder: Path, workers: int, report: Report) -> None:
    """Converts the parts `numbers`, with so many processes (1: this one).

    Raises:
        UserError: a worker found a mistake of the user.
        WorkerDiedError: a worker was killed, or failed with a bug.
    """
    if workers == 1 or len(numbers) <= 1:
        convert_here(plan, numbers, folder, report)
        return
    crew = _Crew(plan, folder, min(workers, len(numbers)), deque(numbers), report)
    try:
        crew.run()
    finally:
        crew.stop()


def _work(connection: Connection, folder: Path) -> None:
    """A worker: gets the plan, then converts the parts whose numbers arrive until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends the workers
    last = 0.0

    def report(number: int, done: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last > _REPORT_S:
            connection.send(("progress", number, done, tokens))
            last = time.monotonic()

    try:
        plan: Plan = connection.recv()
        encoder = Encoder(plan.vocabulary, plan.append_eos)
        while True:
            number = connection.recv()
            write_part(plan, plan.parts[number], folder, encoder, partial(report, number))
            connection.send(("done", number))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone: its death must not leave workers behind
    except UserError as error:
        connection.send(("user", str(error)))
    except BaseException:
        connection.send(("bug", traceback.format_exc()))


class _Crew:
    """The running workers, and who does what."""

    def __init__(self, plan: Plan, folder: Path, size: int, tasks: deque[int], report: Report) -> None:
        self.plan, self.tasks, self.report = plan, tasks, report
        self.workers: dict[Connection, Any] = {}
        self.busy: dict[Connection, int] = {}
        context = multiprocessing.get_context("spawn")
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, folder), daemon=True)
            process.start()
            there.close()
            self.workers[here] = process

    def run(self) -> None:
        """Until every task is done."""
        for connection in self.workers:
            # Not an argument of the process: what multiprocessing writes for a child that died while it started, and
            # that is more than a pipe holds, is waited for without end.
            self._give(connection, self.plan)
        while self.busy:
            sentinels = {self.workers[connection].sentinel: connection for connection in self.busy}
            ready = set(wait([*self.busy, *sentinels]))
            for connection in list(self.busy):
                if connection in ready:
                    self._hear(connection)
                elif self.workers[connection].sentinel in ready:
                    self._bury(connection)

    def stop(self) -> None:
        """Ends every worker, whatever it does."""
        for connection, process in self.workers.items():
            connection.close()
            process.terminate()
        for process in self.workers.values():
            process.join(_TERMINATE_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _give(self, connection: Connection, *before: Plan) -> None:
        """The next task, behind what the worker must know before it."""
        if not self.tasks:
            self.busy.pop(connection, None)
            return
        self.busy[connection] = self.tasks.popleft()
        try:
            for what in (*before, self.busy[connection]):
                connection.send(what)
        except (BrokenPipeError, ConnectionResetError):
            self._bury(connection)

    def _hear(self, connection: Connection) -> None:
        try:
            kind, *rest = connection.recv()
        except (EOFError, ConnectionResetError):
            self._bury(connection)
        if kind == "progress":
            self.report(*rest)
        elif kind == "done":
            part = self.plan.parts[rest[0]]
            self.report(part.number, part.bytes, -1)
            self._give(connection)
        elif kind == "user":
            raise UserError(rest[0])
        else:
            raise WorkerDiedError(f"{self._task(connection)} failed:\n{rest[0]}")

    def _bury(self, connection: Connection) -> NoReturn:
        process = self.workers[connection]
        process.join(_TERMINATE_S)
        code = process.exitcode
        how = f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit code {code}"
        raise WorkerDiedError(
            f"{self._task(connection)} died with {how}; with SIGKILL the machine probably ran out of memory: start "
            "again with fewer --workers, finished parts are kept"
        )

    def _task(self, connection: Connection) -> str:
        number = self.busy[connection]
        sources = [self.plan.sources[piece.source].name for piece in self.plan.parts[number].slices]
        return f"worker with part {number} ({sources[0]}{' and others' if len(set(sources)) > 1 else ''})"

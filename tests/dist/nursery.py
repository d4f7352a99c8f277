"""A process that has imported the trainer once and forks ranks on request, since a rank's imports cost five seconds and
its twelve tiny steps less than one. tests/dist/harness.py starts it and sends it jobs.

A fork is an honest stand-in for a fresh interpreter only while one thread runs and nothing has computed, so this module
imports and does nothing else, and refuses to fork once there is a second thread. CUDA does not survive a fork: where
there is a GPU the harness starts every job anew. So does every test of launchers, signals and dead ranks.

stdin: a JSON object a line, {ranks, command, cwd, env, log, ended}; stdout: the job's process id. The exit code comes
in the file `ended`. A job of several ranks is a process that forks them, as a launcher would, in one process group.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_S = 0.02  # between looks at running jobs
KILLED_AFTER_S = 10  # what is left of a job of which a rank has failed
PORTS = range(15_000, 30_000)  # below those that the kernel hands out to sockets


def import_all() -> None:
    """Everything that a trainer, a worker of these tests or the benchmark imports until its end."""
    import torch._dynamo
    import megatron.core.dist_checkpointing.strategies.fully_parallel
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.models.mimo

    import egmla_megatron.bench.session
    import egmla_megatron.parallel.parity.worker
    import egmla_megatron.train.preflight
    import egmla_megatron.train.session  # noqa: F401


def serve() -> dict[str, Any]:
    """Answers requests until stdin ends; returns in the forked processes only, each with its job."""
    running: dict[int, Path] = {}
    while True:
        asked, _, _ = select.select([sys.stdin], [], [], POLL_S if running else None)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                told = running.pop(pid)
                told.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
                told.with_suffix(".new").rename(told)  # never seen half written
        if asked:
            line = sys.stdin.readline()
            if not line:  # the tests are over, or were interrupted
                for pid in running:
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                sys.exit()
            job: dict[str, Any] = json.loads(line)
            pid = fork()
            if pid == 0:
                return job
            running[pid] = Path(job["ended"])
            print(pid, flush=True)


def fork() -> int:
    """os.fork, where it is safe."""
    import psutil

    threads = psutil.Process().num_threads()
    if threads != 1:
        sys.exit(f"{threads} threads run here, allowed 1: a fork would find their locks taken; import less")
    return os.fork()


def become(job: dict[str, Any]) -> None:
    """This process is the job from here on: its own session, folder, environment and output."""
    os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # the lowest that is free: 0
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def launch(ranks: int) -> None:
    """Forks the ranks and ends with them; returns in each rank, its environment as torchrun makes it."""
    port = free_port()
    alive: set[int] = set()
    for rank in range(ranks):
        pid = fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="nursery")
            return
        alive.add(pid)
    failed = False
    signal.signal(signal.SIGALRM, lambda *_: send(alive, signal.SIGKILL))
    while alive:
        pid, status = os.wait()
        alive.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = True
            print(f"process {pid} ended with exit code {code}, the other ranks are ended", flush=True)
            send(alive, signal.SIGTERM)
            signal.alarm(KILLED_AFTER_S)
    leave(int(failed))


def send(pids: set[int], number: int) -> None:
    """A signal to each of them."""
    for pid in pids:
        os.kill(pid, number)


def free_port() -> int:
    """Jobs that start side by side look from different places, since they have different process ids."""
    for offset in range(len(PORTS)):
        port = PORTS[(os.getpid() * 7 + offset) % len(PORTS)]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):  # nobody listens
                return port
    raise OSError(f"no free port in {PORTS}")


def run(command: list[str]) -> int:
    """`python COMMAND`; its exit code."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    from egmla_megatron.parallel.child_processes import deaf_children

    with deaf_children():
        get_write_results_queue("fork")  # the process behind checkpoints, which else imports torch once more
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> None:
    """Ends this process after its exit functions: taking torch's modules apart, which are shared, takes seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import_all()
    gc.collect()
    gc.freeze()  # collections of the forked processes leave these pages shared
    job = serve()
    become(job)
    if job["ranks"] > 1:
        launch(job["ranks"])
    leave(run(job["command"]))

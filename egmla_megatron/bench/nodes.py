"""One rank a node, each in a network of its own on this machine (`--nodes-on-this-machine`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from egmla_megatron.bench.network import INTERFACE, Network, address, open_network
from egmla_megatron.bench.options import BenchOptions
from egmla_megatron.errors import UserError
from egmla_megatron.parallel.child_processes import end_with

__all__ = ["NODE_MARK", "run_nodes"]

NODE_MARK = "EGMLA_BENCH_NODE"  # in the environment of the ranks that this module starts
_PORT = "29500"  # every network has all ports to itself
_TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_sharding.py"


def _environment(node: int, nodes: int) -> dict[str, str]:
    own = {
        "RANK": str(node),
        "WORLD_SIZE": str(nodes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address(0),
        "MASTER_PORT": _PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "CUDA_VISIBLE_DEVICES": "",  # nodes of this kind compute on the CPU
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that addresses of these networks have no names
        NODE_MARK: str(node),
    }
    return {**os.environ, **own}


def _cores(node: int, nodes: int) -> set[int]:
    """Each node its share of the cores, or a core that it shares with as few others as can be."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // nodes)
    return {cores[(node * share + i) % len(cores)] for i in range(share)}


def _start(node: int, nodes: int, network: Network, arguments: Sequence[str], log: IO[Any]) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def enter() -> None:
        end_with(parent, signal.SIGKILL)
        network.enter(node)
        os.sched_setaffinity(0, _cores(node, nodes))

    # rank 0 speaks for all; what the others say is shown when one fails
    said: dict[str, Any] = {} if node == 0 else {"stdout": log, "stderr": log}
    command = [sys.executable, str(_TOOL), *arguments]
    env = _environment(node, nodes)
    return subprocess.Popen(
        command, preexec_fn=enter, env=env, stdin=subprocess.DEVNULL, start_new_session=True, **said
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """(rank, exit code) of the first that fails, or (0, 0) when all have ended well."""
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes):
            if code:
                return number, code
        if all(code == 0 for code in codes):
            return 0, 0
        time.sleep(0.1)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C instead of ending this process at once."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _failure(rank: int, code: int, said: str) -> int:
    """Says what ended the benchmark, once; its exit code."""
    if rank != 0 and code > 0:
        sys.stderr.write(said[-4000:])
    if code < 0:
        name = signal.Signals(-code).name
        print(f"error: the rank of node {rank} was killed by {name}; the others were ended", file=sys.stderr)
        return 1
    return code


def run_nodes(options: BenchOptions, arguments: Sequence[str]) -> int:
    """Make the network, run this command line on every node, remove everything. Returns the exit code.

    Raises:
        UserError: this machine cannot make networks, or this is itself a rank of a launcher.
    """
    if "RANK" in os.environ:
        raise UserError(
            "--nodes-on-this-machine: got a rank of a launcher, allowed one process that starts the ranks; "
            "call python tools/bench_sharding.py"
        )
    with (
        _terminable(),
        tempfile.TemporaryFile("w+", errors="replace") as log,
        open_network(options.nodes, options.link) as network,
    ):
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for node in range(options.nodes):
                ranks.append(_start(node, options.nodes, network, arguments, log))
            rank, code = _wait(ranks)
        finally:
            _end(ranks)
        log.seek(0)
        return _failure(rank, code, log.read()) if code else 0

"""N networks on this machine, joined by a switch over links of a given rate (Linux, root).

Every node and the switch is a network namespace without a name, held by one idle process that the kernel ends with
this one, however that ends. Namespaces go with the last process in them, and cables and caps go with the namespaces:
nothing can be left behind, and no interface of the machine itself is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from egmla_megatron.bench.rate import bits_per_second
from egmla_megatron.errors import UserError
from egmla_megatron.parallel.child_processes import end_with

__all__ = ["INTERFACE", "Network", "address", "check_machine_for_networks", "open_network"]

INTERFACE = "eth0"  # of a node, in its own namespace
_SUBNET = "198.18.0"  # set aside for benchmarks (RFC 2544)
_KERNEL_TICKS = 100  # a second, at least: a cap's bucket must hold what may pass between two of them
_LEAST_BURST = 256 * 1024  # bytes; a packet that the card would cut up later has up to 64 KiB


def address(node: int) -> str:
    """Of node 0, 1, ..."""
    return f"{_SUBNET}.{node + 1}"


def _run(*command: str, inside: int | None = None) -> None:
    """Run ip or tc, in the network namespace of process `inside`."""
    prefix = ["nsenter", "--net", "--target", str(inside), "--"] if inside else []
    done = subprocess.run([*prefix, *command], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"--nodes-on-this-machine: {' '.join(command)}: {' '.join(done.stderr.split())}; allowed on a kernel with "
            "network namespaces, veth, bridge and tbf; use another machine, or launch/bench_sharding.sh on real nodes"
        )


def check_machine_for_networks() -> None:
    """Raises UserError where networks cannot be made."""
    option, fix = "--nodes-on-this-machine", "use launch/bench_sharding.sh without this option"
    if not hasattr(os, "unshare"):
        raise UserError(f"{option}: got a system without network namespaces, allowed Linux; {fix}")
    if os.geteuid() != 0:
        raise UserError(f"{option}: got user id {os.geteuid()}, allowed root, who alone makes networks; use sudo")
    missing = [name for name in ("ip", "tc", "nsenter") if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"{option}: got no {', '.join(missing)}, allowed a machine with iproute2 and util-linux; install them"
        )


@dataclass(frozen=True)
class Network:
    """Pids of the idle processes that hold the namespaces of the nodes."""

    nodes: tuple[int, ...]

    def enter(self, node: int) -> None:
        """Move this process (in a new child, before exec) to a node's network."""
        with open(f"/proc/{self.nodes[node]}/ns/net") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)


def _holder() -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def alone() -> None:
        end_with(parent, signal.SIGKILL)
        os.unshare(os.CLONE_NEWNET)

    try:  # its own session: Ctrl-C must not take the network from under the ranks
        return subprocess.Popen(["sleep", "infinity"], preexec_fn=alone, start_new_session=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise UserError(
            f"--nodes-on-this-machine: a network namespace was refused ({error}); allowed with CAP_SYS_ADMIN; start "
            "the container with it, or use launch/bench_sharding.sh on real nodes"
        ) from error


def _cap(interface: str, rate: str, inside: int) -> None:
    burst = max(_LEAST_BURST, int(bits_per_second(rate) / 8 / _KERNEL_TICKS))
    limits = ("rate", rate, "burst", str(burst), "latency", "200ms")
    _run("tc", "qdisc", "add", "dev", interface, "root", "tbf", *limits, inside=inside)


def _wire(switch: int, node: int, number: int, rate: str) -> None:
    """A cable between the switch and a node, capped where it leaves either."""
    port = f"port{number}"
    _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(node), inside=switch)
    _run("ip", "link", "set", port, "master", "switch", "up", inside=switch)
    _run("ip", "address", "add", f"{address(number)}/24", "dev", INTERFACE, inside=node)
    for interface in (INTERFACE, "lo"):
        _run("ip", "link", "set", interface, "up", inside=node)
    _cap(port, rate, switch)
    _cap(INTERFACE, rate, node)


@contextmanager
def open_network(nodes: int, rate: str) -> Iterator[Network]:
    """The network, for the length of the block.

    Raises:
        UserError: this machine cannot make one.
    """
    check_machine_for_networks()
    held: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(nodes + 1):
            held.append(_holder())
        switch, *others = (process.pid for process in held)
        _run("ip", "link", "add", "switch", "type", "bridge", inside=switch)
        _run("ip", "link", "set", "switch", "up", inside=switch)
        for number, node in enumerate(others):
            _wire(switch, node, number, rate)
        yield Network(tuple(others))
    finally:
        _end(held)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()

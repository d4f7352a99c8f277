"""`python tools/bench_sharding.py`: is this a rank, or the one that makes nodes and starts ranks?"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from egmla_megatron.bench.nodes import NODE_MARK, run_nodes
from egmla_megatron.bench.options import BenchOptions, parse_options
from egmla_megatron.bench.plan import BenchPlan, make_plan
from egmla_megatron.environment import gpu_count, whole_number
from egmla_megatron.errors import UserError
from egmla_megatron.quiet import quiet_libraries
from egmla_megatron.train.machine import check_machine
from egmla_megatron.train.main import ALONE_AFTER_S

__all__ = ["main"]

# One GPU plays one node: no NVLink, no shared memory, every byte through a socket of this machine.
SLOW_LINK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code.

    Raises:
        UserError: what the user can mend.
    """
    try:
        options = parse_options(arguments)
    except UserError:
        _after_rank_0()
        raise
    if options.nodes and NODE_MARK not in os.environ:
        make_plan(options, options.nodes, cuda=False)  # a mistake is said here, once
        return run_nodes(options, arguments)
    return _rank(options, arguments)


def _plan(options: BenchOptions) -> BenchPlan:
    plan = make_plan(options, whole_number("WORLD_SIZE", 1, 1), cuda=gpu_count() > 0)
    check_machine(plan.base)
    return plan


def _check_one_machine() -> None:
    if not gpu_count():
        raise UserError(
            "--slow-link: got it without a GPU, allowed on GPUs (it takes NCCL's fast links away); use "
            "--nodes-on-this-machine N --link RATE on a CPU"
        )
    here, ranks = whole_number("LOCAL_WORLD_SIZE", 1, 1), whole_number("WORLD_SIZE", 1, 1)
    if here != ranks:
        raise UserError(
            f"--slow-link: got {ranks} ranks, {here} of them on this machine, allowed all on one: its links are "
            "sockets of the machine itself; leave it out, the network is there"
        )


def _rank(options: BenchOptions, arguments: Sequence[str]) -> int:
    try:
        # multicast sums inside the switch: no ring formula counts its bytes
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        if options.slow_link:
            _check_one_machine()
            os.environ.update(SLOW_LINK)
        plan = _plan(options)
        quiet_libraries()
        from egmla_megatron.bench.session import run_ranks
        from egmla_megatron.parallel.child_processes import stop_with_launcher

        stop_with_launcher()
        return run_ranks(plan, ["tools/bench_sharding.py", *arguments])
    except UserError:
        _after_rank_0()
        raise


def _after_rank_0() -> None:
    """Ranks usually make the same mistake: rank 0's word is enough, and its end ends the others."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(ALONE_AFTER_S)

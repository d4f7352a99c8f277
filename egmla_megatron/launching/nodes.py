"""One process on every node, before training: it fails with the node's name (`... egmla_megatron.launching nodes`)."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from egmla_megatron.checkpoint.size import checkpoint_bytes
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.environment import whole_number
from egmla_megatron.errors import UserError
from egmla_megatron.launching.compare import find_problems, find_warnings
from egmla_megatron.launching.facts import gather_facts, node_name
from egmla_megatron.launching.meeting import Host, attend

__all__ = ["LIMIT_S", "check_nodes"]

LIMIT_S = 50  # for all checks of the nodes together
_FACTS_SHARE = 0.6  # of that, for a node to look at itself


def check_nodes(cfg: RunConfig, nodes: Sequence[str], port: int, token: str) -> int:
    """Compare all nodes; every node calls it, the first one speaks. Returns this node's exit code.

    Args:
        nodes: names of all nodes, the first one hosts the meeting.
        port: of the first node.
        token: the same on all nodes of this job, and on no others.

    Raises:
        UserError: on the first node, naming what is wrong on which node; or this node cannot reach the first.
    """
    limit_s = float(whole_number("EGMLA_PREFLIGHT_S", LIMIT_S, 1))
    me = node_name(nodes)
    if me == nodes[0]:
        return _as_host(cfg, nodes, port, token, limit_s)
    facts = {**gather_facts(cfg, token=token, limit_s=_FACTS_SHARE * limit_s), "node": me}
    code = attend(nodes[0], port, token, facts, limit_s)
    if code is None:
        raise UserError(
            f"{me}: {nodes[0]}:{port} cannot be reached or ended early; see what that node says, "
            "and open the ports 20000 to 31999 between the nodes"
        )
    return code


def _as_host(cfg: RunConfig, nodes: Sequence[str], port: int, token: str, limit_s: float) -> int:
    started = time.monotonic()
    with _shared_probe(cfg, token):
        try:
            meeting = Host(port, token, limit_s)
        except OSError as error:
            raise UserError(
                f"{nodes[0]}: port {port} cannot be opened ({error.strerror}); start again, or exclude that node"
            ) from error
        code = 2
        try:
            facts = {nodes[0]: gather_facts(cfg, token="", limit_s=_FACTS_SHARE * limit_s)}
            facts |= meeting.hear(nodes[1:])
            needed_mib = checkpoint_bytes(cfg) / 2**20
            for warning in find_warnings(facts):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
            problems = find_problems(nodes, facts, needed_mib)
            if problems:
                raise UserError("nodes: " + "; ".join(problems))
            code = 0
        finally:
            meeting.dismiss(code)
    skew = max((abs(fact.get("skew_s", 0.0)) for fact in facts.values()), default=0.0)
    mine = facts[nodes[0]]
    print(
        f"nodes    {len(nodes)} alike: {mine['gpus'] or 'no'} GPUs each, Python {mine['versions']['python']}, "
        f"{len(mine['versions'])} packages; {mine['free_mib'] / 1024:.1f} GiB free, {len(mine['data'])} data sets, "
        f"clocks within {skew * 1e3:.0f} ms; {time.monotonic() - started:.1f} s",
        flush=True,
    )
    return code


@contextlib.contextmanager
def _shared_probe(cfg: RunConfig, token: str) -> Iterator[None]:
    """A file beside the run that the other nodes must see."""
    run_dir = Path(cfg.run.dir).absolute()
    existing = next(parent for parent in (run_dir, *run_dir.parents) if parent.is_dir())
    probe = existing / token
    try:
        probe.touch()
    except OSError as error:
        raise UserError(
            f"{node_name()}: run.dir: {existing} cannot be written ({error.strerror}); mend that"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)

"""What is wrong with a set of nodes, judged from their facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["find_problems", "find_warnings"]

MOST_SKEW_S = 60.0  # locks, file times and the order of records go wrong
NOTED_SKEW_S = 1.0
_NAMED = 4  # differences of one node that are written out
_COMPARED = ("versions", "gpu_kinds", "data")


def find_problems(nodes: Sequence[str], facts: Mapping[str, Mapping[str, Any]], needed_mib: float) -> list[str]:
    """Sentences that each begin with a node's name; empty: the job can start.

    Args:
        nodes: all nodes of the job.
        facts: by node, of those that answered; `skew_s` is its clock minus the first node's.
        needed_mib: free space that the run folder must have.
    """
    problems = []
    for node in nodes:
        mine = facts.get(node)
        if mine is None:
            problems.append(f"{node}: gave no answer; look at its log or leave it out (sbatch --exclude={node})")
            continue
        problems += [f"{node}: {problem}" for problem in mine["problems"]]
        if abs(mine.get("skew_s", 0.0)) > MOST_SKEW_S:
            problems.append(f"{node}: its clock is {mine['skew_s']:+.1f} s off, allowed {MOST_SKEW_S:.0f} s; set it")
        if mine.get("free_mib", needed_mib) < needed_mib:
            problems.append(
                f"{node}: run.dir has {mine['free_mib']} MiB free, a checkpoint needs about {needed_mib:.0f} MiB; "
                "free space or move run.dir"
            )
    return problems + _differences(nodes, facts)


def _differences(nodes: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Nodes that differ from what most have; of two equally common kinds the first node's counts."""
    answered = [node for node in nodes if node in facts]
    problems = []
    for what in _COMPARED:
        tables = {node: facts[node][what] for node in answered if what in facts[node]}
        names = sorted({name for table in tables.values() for name in table})
        common = {name: _most_common([table.get(name) for table in tables.values()]) for name in names}
        for node, table in tables.items():
            different = [name for name in names if table.get(name) != common[name]]
            named = ", ".join(f"{name} {table.get(name) or 'missing'}, elsewhere {common[name] or 'missing'}"
                              for name in different[:_NAMED])  # fmt: skip
            if different:
                more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
                problems.append(
                    f"{node}: {named}{more}; make all nodes alike, or leave it out (sbatch --exclude={node})"
                )
    return problems


def _most_common(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]  # the first of equally common ones


def find_warnings(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a person should know and need not stop for."""
    warnings = [f"{node}: {warning}" for node, mine in facts.items() for warning in mine["warnings"]]
    for node, mine in facts.items():
        if MOST_SKEW_S >= abs(mine.get("skew_s", 0.0)) > NOTED_SKEW_S:
            warnings.append(f"{node}: its clock is {mine['skew_s']:+.1f} s off")
    return warnings

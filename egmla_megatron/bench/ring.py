"""Bytes that a collective sends, without torch."""

from __future__ import annotations

__all__ = ["ring_bytes"]


def ring_bytes(name: str, input_bytes: float, ranks: int) -> float:
    """Bytes that one of `ranks` ranks sends where a ring (all-to-all: each pair directly) does the collective.

    Every backend needs at least this many but for reductions inside a switch. gloo has no reduce-scatter of its own:
    it runs an all-reduce, and sends twice what stands here. A broadcast counts its average over the ranks.

    Raises:
        ValueError: a collective that is not known here; what cannot be counted must not pass as nothing.
    """
    kind = name.lower().replace("_", "")
    if kind.startswith("allreduce"):
        return 2 * input_bytes * (ranks - 1) / ranks
    if kind.startswith("allgather"):
        return input_bytes * (ranks - 1)
    if kind.startswith(("reducescatter", "alltoall", "broadcast")):
        return input_bytes * (ranks - 1) / ranks
    if kind == "send":
        return input_bytes
    raise ValueError(f"no formula for the bytes of the collective {name}")

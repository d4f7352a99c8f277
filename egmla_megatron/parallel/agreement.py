"""One configuration on all ranks, checked before the first collective could hang on a difference."""

from __future__ import annotations

import json
from typing import Any

from egmla_megatron.config.load import to_dict
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = ["agree_on", "agree_on_config"]

OWN = {"data.cache_dir", "data.num_workers"}  # what a node may set for itself


def _facts(cfg: RunConfig) -> dict[str, Any]:
    sections = json.loads(json.dumps(to_dict(cfg)))
    flat = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    return {name: value for name, value in flat.items() if name not in OWN}


def agree_on_config(store: Any, rank: int, size: int, cfg: RunConfig) -> None:
    """Compare this rank's configuration with rank 0's. Arguments and errors as `agree_on`."""
    agree_on(store, rank, size, "configuration", _facts(cfg), "start every rank with the same file and overrides")


def agree_on(store: Any, rank: int, size: int, what: str, facts: dict[str, Any], fix: str) -> None:
    """Compare this rank's facts with rank 0's through the rendezvous store, without a collective. Every rank calls it.

    Args:
        store: a torch.distributed store all ranks share; `get` waits for a key.
        what: is compared; once in a process.
        facts: what JSON can hold, by name.
        fix: how to mend a difference.

    Raises:
        UserError: on every rank, naming the first rank that differs, and what differs.
    """
    mine = json.loads(json.dumps(facts))
    if rank == 0:
        store.set(what, json.dumps(mine))
        problems = [store.get(f"{what}/{other}").decode() for other in range(1, size)]
        store.set(f"{what}/verdict", next(filter(None, problems), ""))
    else:
        first = json.loads(store.get(what))
        different = sorted(name for name in mine.keys() | first.keys() if mine.get(name) != first.get(name))
        named = ", ".join(f"{name} {first.get(name)!r} and {mine.get(name)!r}" for name in different[:4])
        store.set(f"{what}/{rank}", f"ranks 0 and {rank} differ: {named}" if different else "")
    problem = store.get(f"{what}/verdict").decode()
    if problem:
        raise UserError(f"{what}: {problem}; {fix}")

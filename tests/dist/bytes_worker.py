"""Worker: counts the bytes of every collective of one training step, layout after layout, on this number of ranks, and
those that it holds.

    bytes_worker.py FOLDER

FOLDER/cases.json holds name -> settings; each rank leaves FOLDER/rank<N>.json: name -> {sent: [[collective, ranks,
bytes], ...], gathered: bytes of megatron-core's buffer for the inputs of GEMMs, saved: bytes that autograd kept of the
step's micro-batches}.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from egmla_megatron.bench.batches import micro_batches, open_dataset
from egmla_megatron.bench.collectives import CollectiveCounter
from egmla_megatron.config.check import check_config
from egmla_megatron.model.build import build_model
from egmla_megatron.parallel.world import World, close_world, form_groups, open_world, seed_everything
from egmla_megatron.train.optimizer import build_optimizer, build_schedule, wrap_ddp
from egmla_megatron.train.step import train_step
from tests.bytes import bytes_run

STEP = 1  # the second: parameters that overlap with forward are gathered from there on


def count(settings: dict[str, Any], world: World) -> dict[str, Any]:
    """What one layout sends and holds."""
    cfg = bytes_run(settings)
    held = parallel_state.get_global_memory_buffer().buffer
    held.clear()
    seed_everything(cfg.run.seed, world)
    built = build_model(cfg, world)
    model = wrap_ddp(cfg, built, world)
    optimizer = build_optimizer(cfg, model, built)
    build_schedule(cfg, optimizer, 0)
    dataset = open_dataset(cfg, 4)
    batches = micro_batches(cfg, world, dataset)
    for _ in range(STEP):
        train_step(cfg, world, model, optimizer, batches)
    with CollectiveCounter() as counter:
        train_step(cfg, world, model, optimizer, batches)
    return {
        "sent": [[each.name, each.ranks, each.sent_bytes] for each in counter.found if each.ranks > 1],
        "gathered": sum(tensor.nbytes for tensor in held.values()),
        "saved": _saved_bytes(model, lambda: train_step(cfg, world, model, optimizer, batches)),
    }


def _saved_bytes(model: list[Any], step: Callable[[], object]) -> int:
    """Of all micro-batches of a step, each storage once, without parameters."""
    weights = {weight.untyped_storage().data_ptr() for chunk in model for weight in chunk.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # kept alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(storage.nbytes() for storage in kept.values())


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    base = world = None
    found = {}
    for name, settings in cases.items():
        cfg = bytes_run(settings)
        layout = check_config(cfg, ranks)
        if base is None:
            base = world = open_world(cfg, layout)
        elif layout != world.layout:  # type: ignore[union-attr]
            world = form_groups(cfg, layout, base.local_rank, base.device, base.store)
        assert world is not None
        print(f"rank {world.rank}: {name}", flush=True)
        found[name] = count(settings, world)
    assert base is not None
    (folder / f"rank{base.rank}.json").write_text(json.dumps(found))
    close_world()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(220, exit=True)  # a hang says where
    main(Path(sys.argv[1]))

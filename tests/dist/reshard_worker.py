"""Worker: hands a checkpoint on from layout to layout of one number of ranks, and says what changed on the way.

    reshard_worker.py FOLDER CHAIN

Every layout loads what the one before it saved (those on fewer ranks were an earlier job), saves it again at once, and
then takes a step of its own.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from egmla_megatron.checkpoint.load import load_checkpoint
from egmla_megatron.checkpoint.save import Saver
from egmla_megatron.config.check import check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.build import BuiltModel, build_model
from egmla_megatron.parallel.parity.cases import chain_config
from egmla_megatron.parallel.parity.training import sample_batches
from egmla_megatron.parallel.world import World, close_world, form_groups, open_world, seed_everything
from egmla_megatron.train.optimizer import build_optimizer, build_schedule, wrap_ddp
from egmla_megatron.train.step import evaluate, graphed_passes, train_step
from tests.dist.chains import CHAINS

SAVED = 2  # steps


def tensors(path: Path) -> dict[str, Tensor]:
    """Every whole tensor of a checkpoint: weights, fp32 weights, moments."""
    metadata = dcp.FileSystemReader(str(path)).read_metadata()
    wanted = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(wanted, checkpoint_id=str(path), no_dist=True)
    return wanted


class Run:
    """A run under one layout."""

    def __init__(self, cfg: RunConfig, world: World) -> None:
        seed_everything(cfg.run.seed, world)
        self.cfg, self.world = cfg, world
        self.built: BuiltModel = build_model(cfg, world)
        self.model = wrap_ddp(cfg, self.built, world)
        self.optimizer = build_optimizer(cfg, self.model, self.built)
        self.graph = graphed_passes(cfg, world, self.model)

    def load(self, path: Path) -> None:
        load_checkpoint(self.cfg, self.world, self.built, self.optimizer, path, "data")

    def save(self, step: int) -> None:
        saver = Saver(self.cfg, self.world, self.built, self.model, self.optimizer, "data", lambda *_: None)
        saver.save(step)
        saver.finish()

    def take(self, first: int, steps: int) -> list[float]:
        """Loss and norm of each step, then the loss after them, which tells whether the optimizer went on as well."""
        schedule = build_schedule(self.cfg, self.optimizer, first)
        numbers = []
        for step in range(first, first + steps):
            stream = sample_batches(self.cfg, self.world, step * self.cfg.train.global_batch_size)
            result = train_step(self.cfg, self.world, self.model, self.optimizer, stream, self.graph)
            schedule.step(1)
            numbers += [result.loss, result.grad_norm]
        count = self.world.layout.num_microbatches
        stream = sample_batches(self.cfg, self.world, 0)
        return [*numbers, evaluate(self.cfg, self.world, self.model, stream, count)]


def hand_on(folder: Path, base: World, chain: str) -> dict[str, Any]:
    """layout -> tensors of the first checkpoint that came back different, and the numbers of the steps after it."""
    found: dict[str, Any] = {}
    links = CHAINS[chain]
    mine = [index for index, (_, ranks, _) in enumerate(links) if ranks == base.size]
    for index in mine:
        name, _, settings = links[index]
        cfg = chain_config(settings, str(folder / name))
        world = form_groups(cfg, check_config(cfg, base.size), base.local_rank, base.device, base.store)
        run = Run(cfg, world)
        print(f"rank {base.rank}: {name}", flush=True)
        if index == 0:
            run.take(0, SAVED)
        else:
            run.load(checkpoint(folder / links[index - 1][0]))
        run.save(SAVED)
        first, got = tensors(checkpoint(folder / links[0][0])), tensors(checkpoint(folder / name))
        changed = [key for key in first.keys() | got.keys() if not same(first.get(key), got.get(key))]
        found[name] = {"tensors": len(got), "changed": sorted(changed), "numbers": run.take(SAVED, 1)}
    return found


def checkpoint(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{SAVED:08d}"


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit for bit."""
    return a is not None and b is not None and torch.equal(a, b)


def main(folder: Path, chain: str) -> None:
    cfg = chain_config({}, str(folder))
    base = open_world(cfg, check_config(cfg, int(os.environ.get("WORLD_SIZE", "1"))))
    (folder / f"rank{base.rank}.json").write_text(json.dumps(hand_on(folder, base, chain)))
    close_world()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(220, exit=True)  # a hang says where
    main(Path(sys.argv[1]), sys.argv[2])

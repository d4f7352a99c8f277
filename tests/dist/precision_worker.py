"""Worker: a bf16 run's checkpoint goes on in fp32; how far apart the ranks' weights are then.

    precision_worker.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from egmla_megatron.config.check import check_config
from egmla_megatron.parallel.parity.cases import chain_config
from egmla_megatron.parallel.world import close_world, open_world
from tests.dist.reshard_worker import SAVED, Run, checkpoint


def main(folder: Path) -> None:
    cfg = chain_config({}, str(folder))
    cfg = replace(cfg, optimizer=replace(cfg.optimizer, distributed=True))
    cfg = replace(cfg, parallel=replace(cfg.parallel, overlap_param_gather=False))
    world = open_world(cfg, check_config(cfg, int(os.environ["WORLD_SIZE"])))
    low = Run(replace(cfg, train=replace(cfg.train, precision="bf16")), world)
    low.take(0, SAVED)
    low.save(SAVED)
    run = Run(cfg, world)
    run.load(checkpoint(folder))
    apart, rounded = 0.0, True
    for weight in run.built.module.parameters():
        mine = weight.detach().clone()
        dist.all_reduce(mine)
        apart = max(apart, float((mine / world.size - weight).abs().max()))
        rounded = rounded and torch.equal(weight, weight.bfloat16().float())
    (folder / f"rank{world.rank}.json").write_text(json.dumps({"apart": apart, "rounded": rounded}))
    close_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

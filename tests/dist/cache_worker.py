"""Worker: builds the data sets on ranks whose nodes share the cache, or have one each (NODES=own)."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.data.dataset import build_datasets
from egmla_megatron.parallel.world import close_world, open_world


def main() -> None:
    folder, config, nodes = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    cfg = load_config(config)
    world = open_world(cfg, check_config(cfg, int(os.environ["WORLD_SIZE"])))
    cache = folder / ("cache" if nodes == "shared" else f"cache{world.rank}")
    cfg = replace(cfg, data=replace(cfg.data, cache_dir=str(cache)))
    if nodes == "own":
        os.environ["LOCAL_RANK"] = "0"  # each rank is the first of its node
    datasets = build_datasets(cfg)
    found = {
        "train": [datasets.train[i]["tokens"].tolist() for i in range(len(datasets.train))],
        "valid": len(datasets.valid),
        "files": sorted(str(path.relative_to(cache)) for path in cache.rglob("*.npy")),
        "unfinished": [path.name for path in cache.iterdir() if path.name.startswith(".")],
    }
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    close_world()


if __name__ == "__main__":
    main()

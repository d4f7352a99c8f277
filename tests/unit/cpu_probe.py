"""A short run with everything in it, once with all CPU redirects and once without each of them.

Writes one JSON object to the file it is given: name of the redirect left out ("" for none) -> the error it led to,
empty when there was none.
The imports take far longer than the runs, so they happen once and every run is a fork of this process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path


def mini_run(folder: Path, without: str) -> None:
    """Two bf16 steps with dropout and full recomputation, an evaluation, a checkpoint written and read again."""
    from egmla_megatron.checkpoint.load import load_checkpoint
    from egmla_megatron.checkpoint.save import Saver
    from egmla_megatron.config.check import check_config
    from egmla_megatron.model.build import build_model
    from egmla_megatron.parallel import cpu
    from egmla_megatron.parallel.world import open_world, seed_everything
    from egmla_megatron.train.optimizer import build_optimizer, wrap_ddp
    from egmla_megatron.train.step import evaluate, train_step
    from tests.tiny import random_batches, tiny_model, tiny_run

    vars(cpu)["install"] = partial(cpu.install, frozenset({without}))
    model = tiny_model(hidden_dropout=0.1)
    precision = {"precision": "bf16", "recompute": "full"}
    cfg = tiny_run(model, str(folder), train=precision, optimizer={"distributed": True, "lr": 1e-2})
    world = open_world(cfg, check_config(cfg, 1))
    seed_everything(cfg.run.seed, world)
    built = build_model(cfg, world)
    wrapped = wrap_ddp(cfg, built, world)
    optimizer = build_optimizer(cfg, wrapped, built)
    batches = random_batches(cfg)
    for _ in range(2):
        if not train_step(cfg, world, wrapped, optimizer, batches).applied:
            raise RuntimeError("the step was not applied")
    evaluate(cfg, world, wrapped, batches, 1)
    saved: list[Path] = []
    Saver(cfg, world, built, wrapped, optimizer, "data", lambda step, path, seconds: saved.append(path)).save(2)
    load_checkpoint(cfg, world, built, optimizer, saved[0], "data")


def outcome(without: str, folder: Path) -> str:
    """Error of a mini-run in a fork of this process; empty when it went well."""
    report = folder / "report"
    pid = os.fork()
    if pid == 0:
        try:
            mini_run(folder / "run", without)
            report.write_text("")
        except BaseException as error:  # whatever it is, it is the answer
            where = traceback.extract_tb(error.__traceback__)[-1]
            report.write_text(
                f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
            )
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(pid, 0)
    return report.read_text() if report.exists() else "the process died"


def main() -> None:
    import torch

    import egmla_megatron.checkpoint.load
    import egmla_megatron.checkpoint.save
    import egmla_megatron.train.step  # noqa: F401 - imported before the forks, see above
    from egmla_megatron.parallel.cpu import REDIRECTS

    torch.set_num_threads(1)
    found = {}
    for without in ["", *REDIRECTS]:
        with tempfile.TemporaryDirectory() as folder:
            found[without] = outcome(without, Path(folder))
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

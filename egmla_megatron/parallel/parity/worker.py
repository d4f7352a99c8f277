"""One rank of the proof: `python -m egmla_megatron.parallel.parity.worker FOLDER PATTERN`, started by the command.

One rank writes the serial references to FOLDER/serial.pt; every rank of a job compares its own part of every tensor,
so replicas that drift apart are seen too, and leaves FOLDER/ranks<N>_<rank>.json.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from egmla_megatron.config.check import check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.parallel.child_processes import stop_with_launcher
from egmla_megatron.parallel.parity.cases import RANKS, Case, all_cases, case_config, matching_cases
from egmla_megatron.parallel.parity.compare import compare, drifted
from egmla_megatron.parallel.parity.training import Snapshot, train_case
from egmla_megatron.parallel.world import World, close_world, form_groups, open_world

TIME_LIMIT_S = 200  # for the start and for each case: a hang says where


def _config(case: Case) -> RunConfig:
    cfg = case_config(case, gpus=torch.cuda.is_available())
    # the reference updates tables as a whole: a fault of updates by rows would be in both
    return replace(cfg, optimizer=replace(cfg.optimizer, deferred_table_updates=case.layout != "serial"))


def _run(case: Case, world: World, serial: dict[str, Snapshot]) -> dict[str, Any]:
    """Errors of a case. A serial case becomes the reference of its model."""
    cfg = _config(case)
    snapshot, named = train_case(cfg, world, planned=case.planned)
    found: dict[str, Any] = {"drifted": drifted(named, world)}
    if case.layout == "serial":
        serial[case.model] = snapshot
        return {}
    if case.model in serial:
        found |= compare(snapshot, serial[case.model], named, cfg, world)
    return found


def _all(cases: list[Case], world: World, serial: dict[str, Snapshot], report: Path) -> None:
    """Cases of one layout follow each other: forming groups costs more than training."""
    base = world
    found: dict[str, Any] = {}
    report.write_text("{}", encoding="utf-8")
    for case in sorted(cases, key=lambda case: (case.layout != "serial", case.layout)):
        faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
        wanted = check_config(_config(case), base.size)
        if wanted != world.layout:
            gc.collect()  # models hold their groups, whose threads would stay
            world = form_groups(_config(case), wanted, base.local_rank, base.device, base.store)
        print(f"rank {base.rank}: {case.name}", flush=True)  # read when a case fails or hangs
        errors = _run(case, world, serial)
        if errors:
            found[case.name] = errors
            report.write_text(json.dumps(found), encoding="utf-8")  # after each case: another may crash


def main(folder: Path, pattern: str) -> None:
    """Train the cases of this number of ranks that match."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    reference = folder / "serial.pt"
    cases = all_cases(ranks)
    matching = {size: matching_cases(size, pattern) for size in RANKS}
    models = {case.model for found in matching.values() for case in found}
    references = [case for case in cases if case.layout == "serial" and case.model in models]
    chosen = [*references, *(case for case in matching[ranks] if case.layout != "serial")]
    stop_with_launcher()
    first = _config(chosen[0])
    world = open_world(first, check_config(first, ranks))
    serial: dict[str, Snapshot] = torch.load(reference, map_location=world.device) if ranks > 1 else {}
    _all(chosen, world, serial, folder / f"ranks{ranks}_{world.rank}.json")
    if ranks == 1:
        torch.save(serial, reference)
    close_world()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    main(Path(sys.argv[1]), sys.argv[2])

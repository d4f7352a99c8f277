"""Bytes of every kind of collective that two gloo ranks really start in a step, against those of the plan."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.config.check import check_config
from egmla_megatron.report.traffic import collectives_of_step
from tests.bytes import LAYOUTS, bytes_run
from tests.dist.harness import results, start_worker

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
KINDS |= {"alltoall": "all_to_all", "send": "send"}
LEFT_OUT_BYTES = 40  # the loss, the gradient norm
NORMS_BYTES = 4600  # gradients of norms and of biases, summed under sequence parallelism
PADDED = 0.004  # of what the distributed optimizer scatters


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found: one start for all layouts."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "cases.json").write_text(json.dumps(LAYOUTS))
    return results(start_worker(2, "bytes_worker.py", folder), folder, 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_bytes_are_those_counted(counted: list[dict[str, Any]], name: str) -> None:
    cfg = bytes_run(LAYOUTS[name])
    layout = check_config(cfg, 2)
    for rank in range(2):
        real: dict[str, float] = defaultdict(float)
        for collective, _, sent in counted[rank][name]:
            plain = collective.replace("_", "").replace("base", "")
            if plain != "broadcast":  # of the loss from the last stage
                real[next(kind for start, kind in KINDS.items() if plain.startswith(start))] += sent
        planned: dict[str, float] = defaultdict(float)
        for each in collectives_of_step(cfg, layout, rank if layout.pp > 1 else 0):
            planned[each.kind] += each.sent_bytes
        for kind in set(real) | set(planned):
            limit = LEFT_OUT_BYTES + NORMS_BYTES * cfg.parallel.sequence
            limit += PADDED * real[kind] * cfg.optimizer.distributed
            print(f"{name}, rank {rank}, {kind}: planned {planned[kind]:.0f}, counted {real[kind]:.0f}")
            assert abs(planned[kind] - real[kind]) <= limit
        assert sum(planned.values()) == pytest.approx(sum(real.values()), rel=0.025)

"""One world of one rank for all unit tests: megatron-core's process groups are global to a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """`World` of one rank. The CPU redirects stay installed for the rest of the session, on a machine without GPU."""
    import torch

    from egmla_megatron.config.check import check_config
    from egmla_megatron.parallel.world import close_world, open_world, seed_everything
    from tests.tiny import tiny_run

    cfg = tiny_run()
    opened = open_world(cfg, check_config(cfg, 1))
    seed_everything(cfg.run.seed, opened)
    torch.set_num_threads(1)  # matrices this small are fastest on one thread, above all on a busy machine
    yield opened
    close_world()

"""A checkpoint goes from layout to layout, interleaved pipelines and context parallelism among them, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import results, start_worker
from tests.dist.layouts import RESHARDED

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Optimizer -> layout -> what became of the checkpoint there."""
    folder: Path = tmp_path_factory.mktemp("reshard")
    ranks: list[dict[str, Any]] = results(start_worker(2, "reshard_worker.py", folder), folder, 2)
    return ranks[0]


@pytest.mark.parametrize(("kind", "layout"), [(kind, name) for kind, names in RESHARDED.items() for name in names])
def test_weights_and_optimizer_states_come_back_bit_for_bit(found: dict[str, Any], kind: str, layout: str) -> None:
    first = found[kind][RESHARDED[kind][0]]
    here = found[kind][layout]
    assert here["changed"] == [] and here["tensors"] == first["tensors"] > 40
    assert here["numbers"] == pytest.approx(first["numbers"], rel=1e-6)

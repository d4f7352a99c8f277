"""What can be said of captured steps without a GPU: who may ask for them, and how their shapes come to rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from egmla_megatron.attention.gate_ids import GatePlan
from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.data.batch import Batch
from egmla_megatron.errors import UserError
from egmla_megatron.train.graph import EAGER_STEPS, GraphedPasses


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("parallel.pipeline=2", "parallel.pipeline=1"),
        ("parallel.tensor=2", "parallel.tensor=1"),
        ("parallel.context=2", "parallel.context=1"),
        ("train.recompute=full", "train.recompute=none"),
        ("model.hidden_dropout=0.1", "model.hidden_dropout=0.0"),
        ("run.deterministic=true", "run.deterministic=false"),
    ],
)
def test_steps_that_differ_are_refused_by_name(override: str, fix: str) -> None:
    name = override.partition("=")[0]
    cfg = load_config("pretrain_base", ["train.cuda_graph=true", override])
    with pytest.raises(UserError, match=f"train.cuda_graph captures whole steps.*{name}.*cuda_graph=false or {fix}"):
        check_config(cfg, 2)
    check_config(load_config("pretrain_base", ["train.cuda_graph=true", "parallel.gate_group=2"]), 2)


def batch(ids: list[int]) -> Batch:
    tokens = torch.tensor([ids])
    rows = GatePlan(((0, 0),), 0, "all_to_all", True, 500).plan({(0, 0): tokens})
    return Batch(tokens, tokens, torch.ones(1, len(ids)), tokens, rows)


def test_rows_are_padded_to_the_most_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps run as they are; the captured one, and all after it, have the largest size so far."""
    seen: list[tuple[int, ...]] = []

    def schedule(batches: Iterator[Batch]) -> list[dict[str, Tensor]]:
        sizes = [each.gate_ids.sizes for each in batches if each.gate_ids is not None]
        seen.extend(sizes)
        return [{"loss": torch.zeros(())} for _ in sizes]

    few, many = batch([7] * 64), batch(list(range(32)) * 2)
    passes = GraphedPasses(schedule, 2)

    def capture(step: list[Batch]) -> None:  # stands for CUDA's, which only records
        schedule(iter(step))
        passes.static = step
        passes.graph = Graph()

    class Graph:
        def replay(self) -> None:
            """Nothing was recorded."""

    monkeypatch.setattr(passes, "_capture", capture)
    for step in range(EAGER_STEPS):
        assert len(passes(iter([few, many if step == 1 else few]))) == 2
    assert few.gate_ids is not None and many.gate_ids is not None
    assert set(seen) == {few.gate_ids.sizes, many.gate_ids.sizes}
    seen.clear()
    passes(iter([few, few]))
    assert seen == [many.gate_ids.sizes] * 2  # captured once, at the size that was seen before
    passes(iter([few, many]))
    assert len(seen) == 2  # replayed
    most = batch(list(range(64)))
    assert most.gate_ids is not None
    passes(iter([few, most]))
    assert seen[2:] == [most.gate_ids.sizes] * 2  # captured anew

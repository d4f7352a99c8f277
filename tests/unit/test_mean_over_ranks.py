"""Where a mean over ranks is taken: in the collective, in a table's look-up, or by megatron-core; and who gathers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from egmla_megatron.attention.token_table import GateTable
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.build import build_model
from egmla_megatron.train.optimizer import _can_average, build_optimizer, gather_weights, wrap_ddp
from tests.tiny import TINY, tiny_run


def can_average(dense: int, tables: int, *, device: str = "cuda", per_token: bool = False) -> bool:
    sizes = {"dp_cp": dense, "expt_dp": tables}
    groups = SimpleNamespace(**{name: SimpleNamespace(size=lambda n=n: n) for name, n in sizes.items()})
    world: Any = SimpleNamespace(groups=groups, device=torch.device(device))
    return _can_average(SimpleNamespace(calculate_per_token_loss=per_token), world)


def test_collectives_divide_where_they_can() -> None:
    assert can_average(8, 1) and can_average(8, 8) and can_average(2, 4)
    assert not can_average(1, 1)  # NCCL would multiply every gradient with one
    assert not can_average(8, 1, device="cpu") and not can_average(8, 1, per_token=True)
    assert (11 / 33) / 11 != 1 / 33 and not can_average(33, 11)  # megatron-core would stop


@pytest.mark.parametrize("per_token", [False, True])
def test_tables_are_scaled_where_they_are_looked_up(world: Any, per_token: bool) -> None:
    """megatron-core's own factor is gone, its reduction a sum; other experts would keep both."""
    cfg = tiny_run(TINY, data={"eod_mask_loss": per_token}, optimizer={"distributed": True})
    (chunk,) = wrap_ddp(cfg, build_model(cfg, world), world)
    (table,) = [module for module in chunk.modules() if isinstance(module, GateTable)]
    for ranks, scale in ((1, 1.0), (4, 1.0 if per_token else 0.25)):
        chunk.dp_cp_group = SimpleNamespace(size=lambda ranks=ranks: ranks)
        (group,) = chunk.expert_parallel_bucket_groups
        group.ddp_config = replace(group.ddp_config, average_in_collective=True)
        group.buckets[0].gradient_scaling_factor = 0.5
        chunk._scale_tables()
        assert table.weight.gradient_scale == scale
        assert group.buckets[0].gradient_scaling_factor == 1.0 and not group.ddp_config.average_in_collective
    stranger = torch.nn.Parameter(torch.zeros(1))
    group.buckets[0].params.add(stranger)
    group.buckets[0].gradient_scaling_factor = 0.5
    chunk._scale_tables()
    assert group.buckets[0].gradient_scaling_factor == 0.5


def test_weights_are_gathered_once_and_not_where_the_next_pass_does(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(**optimizer: bool) -> int:
        cfg: RunConfig = tiny_run(TINY, optimizer=optimizer)
        built = build_model(cfg, world)
        model = wrap_ddp(cfg, built, world)
        calls: list[Any] = []
        monkeypatch.setattr(type(model[0]), "start_param_sync", lambda *given, **_: calls.append(given))
        made = build_optimizer(cfg, model, built)
        gather_weights(cfg, made)
        gather_weights(replace(cfg, parallel=replace(cfg.parallel, overlap_param_gather=True)), made)
        return len(calls)

    assert gathered(distributed=True) == 1  # two optimizers, dense and tables, of one chunk
    assert gathered(distributed=False) == 0

"""Rows of a table that are updated when they are read, against dense updates in every step: every bit is the same.

Here by Triton's interpreter; on a GPU with everything.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from egmla_megatron.report import step_time
from egmla_megatron.train import adam_rows_cuda
from egmla_megatron.train.deferred_rows import DeferredRows
from egmla_megatron.train.device_adam import UpdatePlan
from egmla_megatron.train.update import _squares
from tests.unit.test_device_adam import BETAS, DEVICE, DeviceAdam

SWEEP = 16  # steps
ROWS, SHAPE = 21, (21, 2, 3)
STATES = ("exp_avg", "exp_avg_sq", "master_param")


class Table:
    """A table with its optimizer; `deferred` None: updated as a whole."""

    def __init__(
        self,
        deferred: bool,
        kind: torch.dtype = torch.float32,
        decay: float = 0.0,
        shape: tuple[int, int, int] = SHAPE,
        halves: bool = False,
    ) -> None:
        start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.weight: Any = torch.nn.Parameter(start.to(DEVICE, torch.bfloat16))
        self.weight.main_grad = torch.zeros(shape, dtype=kind, device=DEVICE)
        self.flat: Any = self.weight.detach().view(-1)
        self.flat.decoupled_grad = self.weight.main_grad.view(-1)
        self.optimizer = DeviceAdam([{"params": [self.flat], "weight_decay": decay}], halves=halves)
        self.optimizer.follow(UpdatePlan(BETAS, DEVICE))
        self.rows = DeferredRows(self.optimizer, self.flat, self.weight, SWEEP) if deferred else None
        if self.rows is not None:
            self.optimizer.defer(self.rows)

    def read(self, ids_R: Tensor) -> Tensor:
        if self.rows is not None:
            self.rows.before_look_up(ids_R)
        return self.weight.detach()[ids_R].clone()

    def step(self, ids_R: Tensor, grad: Tensor, lr: float, *, bad: bool) -> Tensor:
        """Gradients for the rows `ids_R`, an update; returns the sum of the gradient's squares."""
        if self.rows is None:
            self.weight.main_grad.zero_()
        assert not self.weight.main_grad.any()
        distinct = ids_R.unique()
        self.weight.main_grad[distinct] = grad[: len(distinct)].to(self.weight.main_grad.dtype)
        squares = self.weight.main_grad.float().square().sum().reshape(1)
        if self.rows is not None:
            torch.testing.assert_close(self.rows.squares(), squares)
        if bad:
            self.weight.main_grad[distinct[0]] = math.nan
        self.optimizer.param_groups[0]["lr"] = lr
        norm = torch.full_like(squares, math.nan) if bad else squares.sqrt()
        self.optimizer.plan.decide(norm, 0.5, self.optimizer.updates())
        self.optimizer.step()
        if bad:
            self.optimizer.take_back()
        return squares

    def whole(self) -> list[Tensor]:
        """Weight and state, up to date."""
        if self.rows is not None:
            self.rows.complete()
        return [self.weight.detach().clone(), *(self.optimizer.state[self.flat][name].clone() for name in STATES)]


def same(tables: list[Table]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(*(table.whole() for table in tables), strict=True))


@pytest.mark.parametrize(
    ("kind", "decay", "halves"), [(torch.float32, 0.0, False), (torch.bfloat16, 0.1, False), (torch.float32, 0.1, True)]
)
def test_every_bit_is_that_of_dense_updates(kind: torch.dtype, decay: float, halves: bool) -> None:
    """Rows that are read often, seldom and never; ids that repeat; several look-ups a step, one without an update;
    updates that do not happen; more steps than are remembered; a learning rate that changes in every one."""
    tables = [Table(deferred, kind, decay, halves=halves) for deferred in (False, True)]
    generator = torch.Generator().manual_seed(1)
    steps = 4 * SWEEP + 5
    for step in range(steps):
        often = torch.randint(0, 4, (3,), generator=generator)
        seldom = torch.randint(4, ROWS - 3, (1,), generator=generator) if step % 12 == 7 else often[:1]
        first_R, second_R = torch.cat([often, often[:1]]).to(DEVICE), seldom.to(DEVICE)
        for ids_R in (first_R, second_R):
            assert torch.equal(*(table.read(ids_R) for table in tables)), step
        grad = torch.randn(5, *SHAPE[1:], generator=generator).to(DEVICE)
        lr = 1e-2 * (1 + math.sin(step))
        for table in tables:
            table.step(torch.cat([first_R, second_R]), grad, lr, bad=step % 9 == 4)
        if step == 30:
            everything_R = torch.arange(ROWS, device=DEVICE)  # as an evaluation
            assert torch.equal(*(table.read(everything_R) for table in tables))
        if step in (0, 40):
            assert same(tables), step
    assert same(tables)
    assert (
        tables[0].optimizer.updates()
        == int(tables[1].optimizer.plan.count_1)
        == steps - sum(step % 9 == 4 for step in range(steps))
    )


def test_updates_do_wait() -> None:
    """What the test above could not tell from updating everything in every step."""
    table = Table(True)
    ids_R, grad = torch.tensor([3], device=DEVICE), torch.ones(1, *SHAPE[1:], device=DEVICE)
    for step in range(3):
        table.read(ids_R if step else ids_R + 1)
        table.step(ids_R if step else ids_R + 1, grad, 1e-2, bad=False)
    assert table.rows is not None
    waiting = table.weight.detach()[4].clone()
    assert table.rows.rows.done_V[[3, 4, 9]].tolist() == [3, 1, 0]
    assert not torch.equal(table.whole()[0][4], waiting)
    assert table.rows.rows.done_V.tolist() == [3] * ROWS


@pytest.mark.parametrize("columns", [64, 768, 2048, 1500])
def test_rows_of_any_width(columns: int) -> None:
    """Of fewer columns than a program takes at once, and of several times as many, with a rest and without."""
    tables = [Table(deferred, shape=(9, 2, columns // 2)) for deferred in (False, True)]
    generator = torch.Generator().manual_seed(2)
    for step in range(7):
        ids_R = torch.randint(0, 5, (2,), generator=generator).to(DEVICE)
        assert torch.equal(*(table.read(ids_R) for table in tables))
        grad = torch.randn(2, 2, columns // 2, generator=generator).to(DEVICE)
        for table in tables:
            table.step(ids_R, grad, 1e-2, bad=step == 3)
    assert same(tables)


def test_what_no_look_up_wrote_is_left_alone() -> None:
    """A gradient of a row that was not read is none: were it garbage, it would stay in the moments for good."""
    table = Table(True)
    ids_R, norm_1 = torch.tensor([3, 99, -1], device=DEVICE), torch.ones(1, device=DEVICE)
    table.weight.main_grad[5] = math.nan
    for _ in range(SWEEP + 1):
        assert table.rows is not None
        table.rows.before_look_up(ids_R if table.rows.steps else ids_R[:1])  # torch refuses wrong ids, not we
        table.optimizer.plan.decide(norm_1, 0.0, table.optimizer.updates())
        table.optimizer.step()
    assert all(tensor.isfinite().all() for tensor in table.whole())


def test_the_norm_counts_rows_and_what_stands_beside_them() -> None:
    """As `update_weights` sums it: tables by rows, other gradients of the same optimizer whole, one that another rank
    counts not at all."""
    tables = [Table(True), Table(True)]
    for table in tables:
        table.read(torch.tensor([2, 4], device=DEVICE))
        table.weight.main_grad[[2, 4]] = 1.5
    other = torch.full((5,), 2.0, device=DEVICE)

    def single(*grads: Tensor) -> Any:
        inner = tables[0].optimizer
        inner.deferred = [table.rows for table in tables]
        group = SimpleNamespace(size=lambda: 1)
        return SimpleNamespace(
            optimizer=inner, get_grads_for_grad_norm=lambda: grads, get_grad_stats_parallel_group=lambda: group
        )

    mains = [table.weight.main_grad.view(-1) for table in tables]
    of_rows = 2 * 6 * 1.5**2
    for grads, expected in (
        ((*mains, other), 2 * of_rows + 20.0),
        ((mains[1],), of_rows),
        ((other, other[:0]), 20.0),
        ((), 0.0),
    ):
        assert _squares(single(*grads)).tolist() == [expected]


def test_a_loaded_table_is_up_to_date() -> None:
    """Into a table with a history of its own, and into a new one; it follows the schedule further."""
    ids_R, grad = torch.tensor([3, 5], device=DEVICE), torch.ones(2, *SHAPE[1:], device=DEVICE)

    def take(table: Table, steps: range) -> None:
        for step in steps:
            table.read(ids_R + step)
            table.optimizer.param_groups[0]["weight_decay"] = 0.01 * step
            table.step(ids_R + step, grad * step, 1e-2 / (1 + step), bad=False)

    origin = Table(True)
    take(origin, range(6))
    weight, *states = origin.whole()
    loaded = [Table(False), Table(True), Table(True)]
    take(loaded[2], range(9))
    for table in loaded:
        table.weight.data.copy_(weight)
        table.optimizer.load_state_dict(origin.optimizer.state_dict())
        # torch made them bf16, FusedAdam would not
        table.optimizer.state[table.flat] = {n: s.clone() for n, s in zip(STATES, states, strict=True)}
        table.read(ids_R)
        table.weight.main_grad.zero_()
    for table in (origin, *loaded):
        take(table, range(6, 12))
    for table in loaded:
        assert same([origin, table])
        assert table.optimizer.updates() == int(table.optimizer.plan.count_1) == 12


def test_the_plan_counts_with_the_same_wait() -> None:
    """It imports no Triton, so it has a number of its own."""
    assert step_time.SWEEP == adam_rows_cuda.SWEEP

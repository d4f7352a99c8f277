"""Gating tables whose rows are updated when they are read: a step reads a few percent of them.

A dense AdamW moves 28 bytes of every element of the tables in every step, most of them for rows whose gradient is zero.
Here such updates wait, at most `SWEEP` steps, and are then made by the same arithmetic: no bit of any row that is read
or saved is another. (Lazy Adams leave them out.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from egmla_megatron.attention.token_table import GateTable
from egmla_megatron.train.device_adam import DecidedOnDevice, single_optimizers

if TYPE_CHECKING:
    from egmla_megatron.train.adam_rows_cuda import RowTensors

__all__ = ["DeferredRows", "complete_rows", "defer_rows", "deferred_rows"]

# V rows, N columns of all layers, R rows that are looked up


class DeferredRows:
    """The rows of one table, and the updates that they lack.

    Args:
        parameter: the table as `optimizer` knows it: flat, the same memory.
        weight_VLC: the table, under megatron-core's DDP.
        sweep: steps that an update waits at most; None: SWEEP of adam_rows_cuda.
    """

    def __init__(
        self, optimizer: DecidedOnDevice, parameter: Tensor, weight_VLC: Tensor, sweep: int | None = None
    ) -> None:
        from egmla_megatron.train.adam_rows_cuda import SWEEP, Rows

        self.optimizer, self.parameter, self.weight_VLC = optimizer, parameter, weight_VLC
        self.rows = Rows.of(len(weight_VLC), weight_VLC.device, sweep or SWEEP)
        self.steps = 0  # launched since the start

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group of the table, another one after a state was loaded."""
        groups = self.optimizer.param_groups
        return next(group for group in groups if any(each is self.parameter for each in group["params"]))

    def before_look_up(self, ids_R: Tensor) -> None:
        """Bring the rows `ids_R`, which may repeat, up to date. On the current stream; can be captured."""
        from egmla_megatron.train.adam_rows_cuda import catch_up

        tensors = self._tensors()
        if tensors is None:  # no update yet
            self.rows.read_V.index_fill_(0, ids_R, 1)
        else:
            catch_up(self.rows, tensors, ids_R, self.optimizer.plan.count_1, **self._betas())

    def squares(self) -> Tensor:
        """Of the gradient, summed [1], fp32."""
        from egmla_megatron.train.adam_rows_cuda import row_squares

        return row_squares(self.rows, self._flat(self.weight_VLC.main_grad))  # type: ignore[attr-defined]

    def update(self) -> None:
        """As planned: the rows that were read, and a few of the others. Zeroes the gradients."""
        from egmla_megatron.train.adam_rows_cuda import update_rows

        tensors, plan = self._tensors(make=True), self.optimizer.plan
        assert tensors is not None
        if self.steps == 0:
            self.rows.done_V.copy_(plan.count_1 - plan.numbers_4[3:].long())
        settings = {name: self.group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        update_rows(self.rows, tensors, plan.count_1, plan.numbers_4, self.steps % self.rows.sweep, **settings)
        self.steps += 1

    def complete(self) -> None:
        """Bring all rows up to date, for who reads the table or its optimizer's state as a whole."""
        from egmla_megatron.train.adam_rows_cuda import advance_all

        tensors = self._tensors()
        if tensors is not None and self.steps:
            advance_all(self.rows, tensors, self.optimizer.plan.count_1, **self._betas())

    def forget(self) -> None:
        """The table and its state are others now, and up to date, however many updates there were."""
        self.steps = 0
        self.rows.read_V.zero_()
        self.rows.done_V.fill_(torch.iinfo(torch.int64).max)

    def _betas(self) -> dict[str, Any]:
        group = self.group
        return {"betas": group["betas"], "eps": group["eps"]}

    def _flat(self, tensor: Tensor) -> Tensor:
        return tensor.view(len(self.weight_VLC), -1)

    def _tensors(self, *, make: bool = False) -> RowTensors | None:
        found = self.optimizer.tensors_of(self.parameter, self.weight_VLC.main_grad, make=make)  # type: ignore[attr-defined]
        return None if found is None else tuple(map(self._flat, found))  # type: ignore[return-value]


def defer_rows(optimizer: Any, model: Sequence[Any]) -> None:
    """Let the tables of `model` be updated by rows, unless other ranks hold the same columns: they look up other rows.

    Args:
        optimizer: megatron-core's, whose updates the device decides (`use_device_adam`).
        model: the chunks, in `DataParallel`.
    """
    owners = {
        p.data_ptr(): (each.optimizer, p)
        for each in single_optimizers(optimizer)
        for group in each.optimizer.param_groups
        for p in group["params"]
    }
    for chunk in model:
        for table in (module for module in chunk.modules() if isinstance(module, GateTable)):
            if table.replicas.size() == 1 and table.weight.requires_grad:
                inner, parameter = owners[table.weight.data_ptr()]
                rows = DeferredRows(inner, parameter, table.weight)
                inner.defer(rows)
                chunk.deferred.append(rows)
                table.before_look_up = rows.before_look_up


def deferred_rows(optimizer: Any) -> list[DeferredRows]:
    """Of all tables that are updated by rows."""
    inner = [each.optimizer for each in single_optimizers(optimizer)]
    return [rows for each in inner if isinstance(each, DecidedOnDevice) for rows in each.deferred]


def complete_rows(optimizer: Any) -> None:
    """Before weights or the optimizer's state are read as a whole: to save them, or to compare."""
    for rows in deferred_rows(optimizer):
        rows.complete()

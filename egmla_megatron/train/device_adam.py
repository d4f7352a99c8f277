"""AdamW whose updates the device decides: the host launches one before it knows the gradient's norm, and goes on.

Transformer Engine's FusedAdam leaves both to the host: the clipping factor is a pass of its own over all gradients, and
an update that must not happen is one that is not launched. (Its capturable kernels want gradients of the weights' type;
these are fp32 beside bf16 weights.) States stay FusedAdam's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from egmla_megatron.train.remainders import WholeMasterWeights

if TYPE_CHECKING:
    from egmla_megatron.train.adam_cuda import AdamTable, AdamTensors
    from egmla_megatron.train.deferred_rows import DeferredRows

__all__ = ["DecidedOnDevice", "UpdatePlan", "plan_of", "single_optimizers", "use_device_adam"]


class UpdatePlan:
    """What the next update does, in numbers on the device; one for all optimizers of a run.

    Args:
        betas: of Adam.
    """

    def __init__(self, betas: tuple[float, float], device: torch.device) -> None:
        self.betas_2 = torch.tensor(betas, dtype=torch.float64, device=device)
        self.count_1 = torch.zeros(1, dtype=torch.int64, device=device)  # updates that were applied
        self.numbers_4 = torch.zeros(4, dtype=torch.float32, device=device)  # see adam_cuda
        self.count_known = False

    def decide(self, norm_1: Tensor, clip: float, count: int) -> Tensor:
        """Plan the next update; returns whether it happens, 1 or 0, on the device.

        Args:
            norm_1: the gradient's over all ranks, fp32.
            clip: largest norm, 0: no clipping.
            count: updates before, as the host knows them; only read after a start.
        """
        from egmla_megatron.train.adam_cuda import decide

        if not self.count_known:
            self.count_1.fill_(count)
            self.count_known = True
        decide(norm_1, self.betas_2, self.count_1, self.numbers_4, clip)
        return self.numbers_4[3:]


class DecidedOnDevice:
    """For a subclass with Transformer Engine's FusedAdam, whose step this replaces."""

    plan: UpdatePlan
    param_groups: list[dict[str, Any]]
    state: Any

    def follow(self, plan: UpdatePlan) -> None:
        """Take updates from `plan`, which must be decided before every step."""
        self.plan = plan
        self.deferred: list[DeferredRows] = []
        self._tables: dict[int, tuple[list[int], tuple[AdamTable, ...]]] = {}

    def defer(self, rows: DeferredRows) -> None:
        """Leave a parameter's updates to `rows`."""
        self.deferred.append(rows)

    def updates(self) -> int:
        """Steps launched so far, less those that were taken back."""
        return max((group.get("step", 0) for group in self.param_groups), default=0)

    def take_back(self) -> None:
        """The last step but those launched since turned out not to happen."""
        for group in self.param_groups:
            group["step"] -= 1

    def step(self, closure: None = None) -> None:
        """Launch an update of all parameters that have a gradient, as planned."""
        from egmla_megatron.train.adam_cuda import adamw

        elsewhere = {id(rows.parameter) for rows in self.deferred}
        for index, group in enumerate(self.param_groups):
            group["step"] = group.get("step", 0) + 1
            mine = [p for p in group["params"] if id(p) not in elsewhere]
            tensors = [found for p in mine if (found := self._tensors(p)) is not None]
            if tensors:
                lr, betas, eps, decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
                for table in self._of_group(index, tensors):
                    adamw(table, self.plan.numbers_4, lr=lr, betas=betas, eps=eps, weight_decay=decay)
        for rows in self.deferred:
            rows.update()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As FusedAdam's; tensors and groups are others afterwards, and the count of updates is that of the state."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._tables.clear()
        self.plan.count_known = False
        for rows in self.deferred:
            rows.forget()

    def _tensors(self, parameter: Tensor) -> AdamTensors | None:
        grad = getattr(parameter, "decoupled_grad", None)  # where megatron-core puts gradients of another type
        if grad is None or not grad.numel():
            return None
        return self.tensors_of(parameter, grad, make=True)

    def tensors_of(self, parameter: Tensor, grad: Tensor, *, make: bool) -> AdamTensors | None:
        """The gradient and what is updated with it; None: before the first update, which makes them."""
        if not self.state[parameter]:
            if not make:
                return None
            self.initialize_state(parameter, False)  # type: ignore[attr-defined]
        state = self.state[parameter]
        return grad, parameter.data, state["exp_avg"], state["exp_avg_sq"], state["master_param"]

    def _of_group(self, index: int, tensors: list[AdamTensors]) -> tuple[AdamTable, ...]:
        """Tables of a parameter group; made anew when a gradient lies elsewhere."""
        from egmla_megatron.train.adam_cuda import adam_tables

        places = [tensor.data_ptr() for group in tensors for tensor in group]
        known = self._tables.get(index)
        if known is None or known[0] != places:
            self._tables[index] = known = (places, adam_tables(tensors))
        return known[1]


def single_optimizers(optimizer: Any) -> list[Any]:
    """Those of megatron-core's optimizer that have parameters on this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in chained if not getattr(each, "is_stub_optimizer", False)]


def plan_of(optimizer: Any) -> UpdatePlan | None:
    """The plan that megatron-core's optimizer follows; None: its host decides."""
    plans = [
        each.optimizer.plan for each in single_optimizers(optimizer) if isinstance(each.optimizer, DecidedOnDevice)
    ]
    return plans[0] if plans else None


def use_device_adam(optimizer: Any, betas: tuple[float, float], device: torch.device, *, remainders: bool) -> None:
    """Let updates of megatron-core's distributed optimizer with master weights inside FusedAdam be decided on the
    device.

    Args:
        remainders: keep the lower halves of master weights only (`WholeMasterWeights`).
    """
    from transformer_engine.pytorch.optimizers import FusedAdam

    class DeviceAdam(DecidedOnDevice, WholeMasterWeights, FusedAdam):
        pass

    plan = UpdatePlan(betas, device)
    for each in single_optimizers(optimizer):
        given = each.optimizer
        each.optimizer = DeviceAdam(
            given.param_groups,
            betas=betas,
            master_weights=True,
            store_param_remainders=remainders,
            use_decoupled_grad=True,
            exp_avg_dtype=given.exp_avg_dtype,
            exp_avg_sq_dtype=given.exp_avg_sq_dtype,
            master_weight_dtype=given.master_weight_dtype,
        )
        each.optimizer.follow(plan)

"""AdamW decided on the device against torch's in float64, here by Triton's interpreter; on a GPU with everything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from egmla_megatron.train.adam_cuda import PIECE, adam_tables, adamw
from egmla_megatron.train.device_adam import DecidedOnDevice, UpdatePlan, plan_of, single_optimizers
from egmla_megatron.train.remainders import join_halves
from egmla_megatron.train.step import StepInFlight
from egmla_megatron.train.update import update_weights

BETAS, CLIP = (0.9, 0.95), 0.5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class MasterWeights(torch.optim.Optimizer):
    """What `DecidedOnDevice` needs of Transformer Engine's FusedAdam; `halves`: lower ones only of master weights."""

    def __init__(self, groups: list[dict[str, Any]], *, halves: bool = False) -> None:
        super().__init__(groups, {"lr": 1e-2, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1})
        self.halves = halves

    def initialize_state(self, parameter: Tensor, _: bool) -> None:
        master = parameter.detach().float().clone()
        self.state[parameter] = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter]["master_param"] = torch.zeros_like(master, dtype=torch.int16) if self.halves else master


class DeviceAdam(DecidedOnDevice, MasterWeights):
    pass


def weights(*sizes: int, kind: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(DEVICE, kind)) for size in sizes]


def with_gradients(parameters: list[torch.nn.Parameter], seed: int, kind: torch.dtype) -> Tensor:
    """Sets them; returns their norm."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        # in a larger buffer and off its start, as megatron-core's are: neither aligned nor alone
        buffer = torch.randn(parameter.numel() + 1, generator=generator).to(DEVICE, kind)
        parameter.decoupled_grad = buffer[1:] if parameter.numel() == 7 else buffer[:-1]
    return torch.cat([p.decoupled_grad.double() for p in parameters]).norm().float().reshape(1)


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 64, 4096), (7, 2051)])
def test_updates_equal_torch_in_float64(sizes: tuple[int, ...], weight: torch.dtype, grad: torch.dtype) -> None:
    """Two groups, an update that does not happen in the middle, gradients above and below the clipping norm."""
    mine = weights(*sizes, 5, kind=weight)
    exact = [torch.nn.Parameter(p.detach().double()) for p in mine]
    groups = [{"params": mine[:-1]}, {"params": mine[-1:], "weight_decay": 0.0, "lr": 3e-2}]
    optimizer = DeviceAdam(groups)
    optimizer.follow(UpdatePlan(BETAS, DEVICE))
    reference = torch.optim.AdamW(
        [{"params": exact[:-1]}, {"params": exact[-1:], "weight_decay": 0.0, "lr": 3e-2}],
        lr=1e-2, betas=BETAS, eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
    for step, clip in enumerate((CLIP, 0.0, 1e9, CLIP)):
        norm = with_gradients(mine, step, grad)
        for p, q in zip(mine, exact, strict=True):
            q.grad = p.decoupled_grad.double() * (min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0)
        if step == 2:
            before = [p.detach().clone() for p in mine]
            for bad in (math.nan, math.inf):
                assert optimizer.plan.decide(torch.full_like(norm, bad), clip, optimizer.updates()).item() == 0
                optimizer.step()
                optimizer.take_back()
            assert all(torch.equal(p, q) for p, q in zip(mine, before, strict=True))
        assert optimizer.plan.decide(norm, clip, optimizer.updates()).item() == 1
        optimizer.step()
        reference.step()
    assert optimizer.updates() == optimizer.plan.count_1.item() == 4
    for p, q in zip(mine, exact, strict=True):
        state, expected = optimizer.state[p], reference.state[q]
        torch.testing.assert_close(state["exp_avg"].double(), expected["exp_avg"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"].double(), expected["exp_avg_sq"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["master_param"].double(), q.detach(), rtol=1e-5, atol=1e-6)
        # Triton's interpreter cuts bits off where a GPU rounds
        ulp = 0.0 if DEVICE.type == "cuda" or weight == torch.float32 else 2**-7
        torch.testing.assert_close(p.detach(), state["master_param"].to(weight), rtol=ulp, atol=0.0)


def test_lower_halves_of_master_weights_are_enough() -> None:
    """Moments and master weights of many updates, bit by bit."""
    found = []
    for halves in (False, True):
        mine = weights(7, 2051, 4096, kind=torch.bfloat16)
        optimizer = DeviceAdam([{"params": mine}], halves=halves)
        optimizer.follow(UpdatePlan(BETAS, DEVICE))
        for step in range(12):
            optimizer.plan.decide(with_gradients(mine, step, torch.float32), CLIP, optimizer.updates())
            optimizer.step()
        states = [dict(optimizer.state[p]) for p in mine]
        for p, state in zip(mine, states, strict=True):
            master = state["master_param"]
            state["master_param"] = join_halves(p.detach(), master) if halves else master.cpu()
            nearest = (state["master_param"] - p.detach().float().cpu()).abs() <= p.detach().float().cpu().abs() * 2**-8
            assert nearest.all() or not halves  # Triton's interpreter cuts bits off otherwise
        found.append(states)
    for whole, half in zip(*found, strict=True):
        assert whole.keys() == half.keys() and all(torch.equal(whole[name], half[name]) for name in whole)
        assert (whole["master_param"].view(torch.int32) & 0xFFFF).unique().numel() > 2


def test_a_loaded_state_goes_on_where_it_was() -> None:
    """Also when it comes from another process: the count of updates is that of the state."""
    runs = [(parameters := weights(9, kind=torch.bfloat16), DeviceAdam([{"params": parameters}])) for _ in range(2)]
    for _, optimizer in runs:
        optimizer.follow(UpdatePlan(BETAS, DEVICE))

    def step(run: tuple[Any, Any], seed: int) -> None:
        parameters, optimizer = run
        optimizer.plan.decide(with_gradients(parameters, seed, torch.float32), CLIP, optimizer.updates())
        optimizer.step()

    first, second = runs
    for seed in range(3):
        step(first, seed)
    step(second, 7)  # has a history of its own
    second[0][0].data.copy_(first[0][0].data)
    second[1].load_state_dict(first[1].state_dict())
    for name, value in first[1].state[first[0][0]].items():  # torch made them bf16, FusedAdam would not
        second[1].state[second[0][0]][name] = value.clone()
    for run in runs:
        step(run, 3)
    assert torch.equal(first[0][0], second[0][0])
    assert second[1].updates() == second[1].plan.count_1.item() == 4


def test_a_parameter_without_gradient_stays() -> None:
    one, other = weights(4, 4, kind=torch.bfloat16)
    optimizer = DeviceAdam([{"params": [one, other]}])
    optimizer.follow(UpdatePlan(BETAS, DEVICE))
    norm = with_gradients([one], 0, torch.float32)
    before = other.detach().clone()
    optimizer.plan.decide(norm, 0.0, 0)
    optimizer.step()
    assert torch.equal(other, before) and not optimizer.state[other]


def test_several_pieces_and_what_does_not_fit() -> None:
    size = PIECE + 3
    tensors = tuple(torch.ones(size, dtype=torch.float32, device=DEVICE) for _ in range(5))
    (table,) = adam_tables([tensors])
    assert table.rows_C6[:, 5].tolist() == [PIECE, 3] and table.aligned
    plan = torch.tensor([1.0, 1.0, 1.0, 1.0], device=DEVICE)
    adamw(table, plan, lr=1.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.5)
    assert tensors[1].unique().tolist() == [-0.5]  # 1 - (1 / 1 + 0.5 * 1)
    off, *others = (torch.zeros(size + 1, dtype=torch.float32, device=DEVICE)[start:] for start in (1, 0, 0, 0, 0))
    fits, does_not = adam_tables([tensors, (off, *(each[:-1] for each in others))])
    assert (fits.aligned, does_not.aligned) == (True, False) and len(fits.rows_C6) == len(does_not.rows_C6) == 2
    with pytest.raises(ValueError, match="one size"):
        adam_tables([(tensors[0][:4], *tensors[1:])])
    with pytest.raises(ValueError, match="moments and master weights are fp32"):
        adam_tables([(*tensors[:2], tensors[2].bfloat16(), *tensors[3:])])
    with pytest.raises(ValueError, match="contiguous"):
        adam_tables([tuple(each[::2] for each in tensors)])


class Single:
    """What `update_weights` needs of megatron-core's distributed optimizer; None: it has no parameters here."""

    def __init__(self, optimizer: DeviceAdam | None) -> None:
        self.optimizer, self.is_stub_optimizer = optimizer, optimizer is None

    def get_grad_norm(self) -> Tensor:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        grads = [p.decoupled_grad.double().flatten() for group in groups for p in group["params"]]
        return torch.cat(grads).norm().float() if grads else torch.zeros(1, device=DEVICE)


class Chained:
    """As megatron-core's; the optimizers sum their norms over different groups of ranks."""

    def __init__(self, *optimizers: DeviceAdam | None) -> None:
        self.chained_optimizers = [Single(each) for each in optimizers]

    def grads_states_parallel_group_is_shared(self) -> bool:
        return False

    def prepare_grads(self) -> bool:
        return False

    def step_with_ready_grads(self) -> bool:
        for each in single_optimizers(self):
            each.optimizer.step()
        return True


def test_steps_in_flight_of_several_optimizers() -> None:
    """One norm over all of them. The host hears of a bad step when the next is launched: both count the same steps."""
    mine = weights(6, 9, kind=torch.bfloat16)
    plan, inner = UpdatePlan(BETAS, DEVICE), [DeviceAdam([{"params": [p]}, {"params": []}]) for p in mine]
    for each in inner:
        each.follow(plan)
    optimizer = Chained(inner[0], None, inner[1])
    flights, norms = [], []
    for step in range(4):
        norm = with_gradients(mine, step, torch.float32)
        if step == 1:
            mine[1].decoupled_grad[3] = math.nan
        norms.append(norm.item())
        before = [p.detach().clone() for p in mine]
        loss = torch.tensor(step + 0.5, device=DEVICE)
        flights.append(StepInFlight(loss, update_weights(optimizer, CLIP), optimizer))
        assert all(torch.equal(p, q) for p, q in zip(mine, before, strict=True)) == (step == 1)
        if step:
            flights[step - 1].result()
    found = [flight.result() for flight in flights]
    assert [flight.result() for flight in flights] == found  # asked again, nothing is taken back twice
    assert [each.applied for each in found] == [True, False, True, True]
    assert [each.loss for each in found] == [0.5, 1.5, 2.5, 3.5]
    assert [found[step].grad_norm for step in (0, 2, 3)] == pytest.approx([norms[step] for step in (0, 2, 3)], rel=1e-6)
    steps = {group["step"] for each in inner for group in each.param_groups}
    assert steps == {plan.count_1.item()} == {3}  # one number, which checkpoints want, also of a group without weights


def test_an_optimizer_of_the_host_has_no_plan() -> None:
    assert plan_of(Chained()) is None and single_optimizers(Chained()) == []
    assert plan_of(Chained(None)) is None and single_optimizers(Chained(None)) == []

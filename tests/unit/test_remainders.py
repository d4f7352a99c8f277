"""Master weights of which only the lower halves are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from egmla_megatron.train import remainders
from egmla_megatron.train.remainders import WholeMasterWeights, join_halves, split_halves


def halves_of(master: Tensor) -> tuple[Tensor, Tensor]:
    weight, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split_halves(master, weight, low)
    return weight, low


def test_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any finite number, of several chunks; the weight is the nearest bf16 number, ties aside torch's."""
    monkeypatch.setattr(remainders, "_CHUNK", 1000)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (70, 101), generator=generator).int()
    bits[:4, :4] = torch.tensor([0, 0x8000, 0x7FFF, -(2**31) + 0x8000]).int()  # zeros, ties, just below a tie
    master = bits.view(torch.float32)
    master = torch.where(master.abs() < 1e38, master, torch.ones(()))
    weight, low = halves_of(master)
    assert torch.equal(join_halves(weight, low).view(torch.int32), master.view(torch.int32))
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert ties.any() and torch.equal(weight[~ties], master.bfloat16()[~ties])
    assert (weight[ties].float().abs() > master[ties].abs()).all()


class FusedAdam(torch.optim.Optimizer):
    """What Transformer Engine's does with states that it keeps as halves."""

    def __init__(self, params: list[Any]) -> None:
        super().__init__(params, {"lr": 1.0})
        self.store_param_remainders = True

    def initialize_state(self, param: Tensor, halves: bool) -> None:
        master = torch.zeros_like(param, dtype=torch.int16) if halves else param.detach().float()
        self.state[param] = {"exp_avg": torch.zeros_like(param, dtype=torch.float32), "master_param": master}

    def get_unscaled_state(self, param: Tensor, name: str, skip_unscale: bool = False) -> Tensor:
        return self.state[param][name]

    def set_scaled_state(self, param: Tensor, name: str, state: Tensor) -> None:
        halves = name == "master_param" and param.dtype == torch.bfloat16
        assert state.dtype == (torch.int16 if halves else torch.float32)
        self.state[param][name] = state.clone()

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        for index, state in found["state"].items():
            found["state"][index] = {name: self.get_unscaled_state(params[index], name) for name in state}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for index, state in state_dict["state"].items():
            self.state[params[index]] = {}
            for name, value in state.items():
                self.set_scaled_state(params[index], name, value)


class Adam(WholeMasterWeights, FusedAdam):
    """One bf16 weight and one in fp32, whose master weight is whole."""

    def __init__(self, masters: list[Tensor] | None = None) -> None:
        self.weights = [torch.nn.Parameter(torch.zeros(9, dtype=kind)) for kind in (torch.bfloat16, torch.float32)]
        super().__init__([{"params": [weight]} for weight in self.weights])
        for weight, master in zip(self.weights, masters or [], strict=bool(masters)):
            self.initialize_state(weight)
            self.set_scaled_state(weight, "master_param", master)

    def masters(self) -> list[Tensor]:
        return [self.get_unscaled_state(weight, "master_param") for weight in self.weights]


def test_who_asks_sees_whole_master_weights() -> None:
    masters = [torch.randn(9, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    adam = Adam(masters)
    assert [adam.state[weight]["master_param"].dtype for weight in adam.weights] == [torch.int16, torch.float32]
    assert all(torch.equal(*pair) for pair in zip(adam.masters(), masters, strict=True))
    assert torch.equal(adam.weights[0], masters[0].bfloat16())


def test_states_go_over_whole_or_as_they_are_kept() -> None:
    masters = [torch.randn(9, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    adam = Adam(masters)
    kept = adam.state_dict()
    assert kept["state"][0]["master_param"].dtype == torch.int16
    whole = {**kept, "state": {key: dict(state) for key, state in kept["state"].items()}}
    whole["state"][0]["master_param"] = masters[0]
    for state in (kept, whole):
        other = Adam()
        if state is kept:  # halves alone are nothing without their weights
            other.weights[0].data.copy_(adam.weights[0])
        other.load_state_dict(state)
        assert all(torch.equal(*pair) for pair in zip(other.masters(), masters, strict=True))
        assert torch.equal(other.weights[0], adam.weights[0])

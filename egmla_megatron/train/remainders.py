"""fp32 master weights of which only the lower 16 bits are kept: the bf16 weight beside them is the upper half.

As in Transformer Engine's FusedAdam (`store_param_remainders`) the weight is rounded to nearest, halves away from zero:
the upper half of the master weight is the weight's bits, less 1 where the lower half, read as int16, is negative.
Nothing is lost, and 2 of 18 bytes of a parameter are saved. Transformer Engine hands out lower halves as they are; here
who asks for a master weight, or sets one, sees fp32, so that checkpoints are those of any optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

__all__ = ["WholeMasterWeights", "join_halves", "split_halves"]

_CHUNK = 2**24  # elements whose bits are int32 at a time: a gating table alone can be gigabytes


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.view(-1).split(_CHUNK) for tensor in tensors), strict=True)


def join_halves(weight: Tensor, low: Tensor) -> Tensor:
    """bf16 weight and lower halves, int16, of one shape -> fp32 master weights, on the CPU, to be saved."""
    found = torch.empty(weight.shape, dtype=torch.float32)
    for upper, lower, out in _chunks(weight.contiguous(), low.contiguous(), found):
        high = upper.view(torch.int16).int() - (lower < 0).int()
        out.copy_(((high << 16) | (lower.int() & 0xFFFF)).view(torch.float32))
    return found


def split_halves(master: Tensor, weight: Tensor, low: Tensor) -> None:
    """Inverse of `join_halves`: writes the bf16 weight and the lower halves, both contiguous."""
    for given, upper, lower in _chunks(master.contiguous(), weight, low):
        bits = given.to(weight.device).view(torch.int32)
        lower.copy_((bits << 16) >> 16)
        upper.view(torch.int16).copy_((bits >> 16) + (lower < 0).int())


class WholeMasterWeights:
    """For a subclass with Transformer Engine's FusedAdam: its state in fp32 for everyone, however it is kept."""

    store_param_remainders: bool
    param_groups: list[dict[str, Any]]
    _as_kept = False

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Moments of zero, and the weight as it is as its master weight."""
        keep = store_param_remainders or self._halves(param)
        super().initialize_state(param, keep)  # type: ignore[misc]

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """As FusedAdam's; master weights in fp32, on the CPU."""
        found = super().get_unscaled_state(param, state_name, skip_unscale)  # type: ignore[misc]
        return join_halves(param.data, found) if found.dtype == torch.int16 and not self._as_kept else found

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """As FusedAdam's; a master weight in fp32 also sets the weight."""
        if state_name == "master_param" and self._halves(param):
            unscaled_state = self._split(param, unscaled_state)
        super().set_scaled_state(param, state_name, unscaled_state)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """As FusedAdam's, with what is kept: megatron-core asks for all at once where it wants the groups alone."""
        self._as_kept = True
        try:
            return super().state_dict()  # type: ignore[misc]
        finally:
            self._as_kept = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As FusedAdam's; master weights in fp32 also set the weights."""
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = chain.from_iterable(group["params"] for group in self.param_groups)
        states = dict(state_dict["state"])
        for key, param in zip(keys, mine, strict=True):
            if key in states and self._halves(param):
                states[key] = {**states[key], "master_param": self._split(param, states[key]["master_param"])}
        super().load_state_dict({**state_dict, "state": states})  # type: ignore[misc]

    def _halves(self, param: Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    @staticmethod
    def _split(param: Tensor, master: Tensor) -> Tensor:
        if master.dtype == torch.int16:
            return master
        low = torch.empty_like(param.data, dtype=torch.int16)
        split_halves(master, param.data, low)
        return low

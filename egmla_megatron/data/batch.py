"""Micro-batches on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from egmla_megatron.data.context_shard import context_shard
from egmla_megatron.parallel.child_processes import deaf_children

__all__ = ["Batch", "batch_iterator"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank. B sequences, S tokens: with context parallelism those of this rank alone."""

    tokens_BS: Tensor  # int64
    labels_BS: Tensor  # int64, the next token
    loss_mask_BS: Tensor  # float32, 0 where the loss does not count
    position_ids_BS: Tensor  # int64

    def context_part(self, rank: int, size: int) -> Batch:
        """What context-parallel rank `rank` of `size` holds of whole sequences, [B,S] -> [B,S/size]."""
        names = ("tokens_BS", "labels_BS", "loss_mask_BS", "position_ids_BS")
        return replace(self, **{name: context_shard(getattr(self, name), rank, size) for name in names})


class _Samples(torch.utils.data.Dataset):
    """Keeps only the tensors that a batch needs of a megatron-core sample."""

    def __init__(self, dataset: Any, names: tuple[str, ...]) -> None:
        self.dataset, self.names = dataset, names

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.dataset[index]
        return {name: sample[name] for name in self.names}


def batch_iterator(
    dataset: Any,
    indices: Iterable[list[int]],
    device: torch.device,
    *,
    num_workers: int,
    context: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yields the micro-batches that `indices` names. On a GPU the copy runs beside steps that are queued.

    dataset: megatron-core's; its config says whether positions count from the start of each document.
    context: this rank's number among the context-parallel ranks, and how many there are.
    """
    cuda = device.type == "cuda"
    own_positions: bool = dataset.config.reset_position_ids
    names = ("tokens", "labels", "loss_mask", *(["position_ids"] if own_positions else []))
    loader: DataLoader[Any] = DataLoader(
        _Samples(dataset, names),
        batch_sampler=indices,
        num_workers=num_workers,
        pin_memory=cuda,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # its own: each start of a loader draws a number, which would shift dropout
    )
    with deaf_children():
        samples = iter(loader)
    positions_S: Tensor | None = None
    for sample in samples:
        tokens, labels, mask, *positions = (sample[name].to(device, non_blocking=True) for name in names)
        if own_positions:
            positions_BS = positions[0]
        else:
            if positions_S is None:
                positions_S = torch.arange(tokens.shape[1], device=device)
            positions_BS = positions_S[None].expand(tokens.shape[0], -1)
        yield Batch(tokens, labels, mask.float(), positions_BS).context_part(*context)

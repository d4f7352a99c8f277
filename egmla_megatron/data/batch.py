"""Micro-batches on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from egmla_megatron.attention.gate_ids import GateIds, GatePlan
from egmla_megatron.data.context_shard import context_shard
from egmla_megatron.data.locate import locate_token
from egmla_megatron.errors import UserError
from egmla_megatron.parallel.child_processes import deaf_children

__all__ = ["Batch", "DataShare", "batch_iterator"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank. B sequences, S tokens (of this rank, under context parallelism)."""

    tokens_BS: Tensor  # int64
    labels_BS: Tensor  # int64, the next token
    loss_mask_BS: Tensor  # float32, 0 where the loss does not count
    position_ids_BS: Tensor  # int64
    gate_ids: GateIds | None = None  # rows of the gating tables; None: the model finds them
    distinct_ids: int = 0  # different ids among the tokens, 0: not counted


@dataclass(frozen=True)
class DataShare:
    """Which tokens of a micro-batch this rank trains on, and what its gating tables must know of the others'."""

    vocab_size: int
    dp_rank: int = 0
    cp_rank: int = 0
    cp_size: int = 1
    plan: GatePlan | None = None  # None: a model without gating tables

    @property
    def dp_ranks(self) -> tuple[int, ...]:
        """Data-parallel ranks whose samples this rank reads: its own and, for the tables, its gate group's."""
        members = self.plan.members if self.plan else ()
        return tuple(sorted({self.dp_rank, *(dp_rank for dp_rank, _ in members)}))


class _BadTokenError(Exception):
    """A token id that the vocabulary does not have; the message says where it stands."""


class _MicroBatches(torch.utils.data.Dataset):
    """Sample numbers of one micro-batch, by data-parallel rank -> its tensors."""

    def __init__(self, dataset: Any, names: tuple[str, ...], share: DataShare) -> None:
        self.dataset, self.names, self.share = dataset, names, share

    def __getitem__(self, chosen: dict[int, list[int]]) -> dict[str, Any]:
        """Named tensors [B,S], `gate_ids` as a tuple; `problem` alone where a token id is out of range."""
        try:
            return self._read(chosen)
        except _BadTokenError as error:  # exceptions of loader processes arrive as tracebacks: a message does not
            return {"problem": str(error)}

    def _read(self, chosen: dict[int, list[int]]) -> dict[str, Any]:
        share = self.share
        samples = {rank: [self.dataset[number] for number in numbers] for rank, numbers in chosen.items()}
        tokens = {rank: torch.stack([sample["tokens"] for sample in rows]) for rank, rows in samples.items()}
        for rank, ids_BS in tokens.items():
            self._check(chosen[rank], ids_BS, 0)
        mine = samples[share.dp_rank]
        whole = {name: torch.stack([sample[name] for sample in mine]) for name in self.names}
        self._check(chosen[share.dp_rank], whole["labels"], 1)
        found: dict[str, Any] = {
            name: context_shard(x_BS, share.cp_rank, share.cp_size) for name, x_BS in whole.items()
        }
        if share.plan is not None:
            members = set(share.plan.members)
            parts = {(dp, cp): context_shard(tokens[dp], cp, share.cp_size) for dp, cp in members}
            found["gate_ids"] = share.plan.plan(parts).tensors
            found["distinct_ids"] = int(torch.bincount(found["tokens"].flatten()).count_nonzero())
        return found

    def _check(self, numbers: list[int], ids_BS: Tensor, shift: int) -> None:
        """`shift`: position of the first id in its sample; labels are the tokens one position later."""
        vocab_size = self.share.vocab_size
        if int(ids_BS.min()) >= 0 and int(ids_BS.max()) < vocab_size:
            return
        row, position = ((ids_BS < 0) | (ids_BS >= vocab_size)).nonzero()[0].tolist()
        place = locate_token(self.dataset, numbers[row], position + shift)
        raise _BadTokenError(
            f"data: got token id {int(ids_BS[row, position])} ({place}), allowed 0 to {vocab_size - 1} "
            f"(model.vocab_size = {vocab_size}); tokenize with the model's tokenizer, or set model.vocab_size"
        )


def batch_iterator(
    dataset: Any, chosen: Iterable[dict[int, list[int]]], device: torch.device, *, num_workers: int, share: DataShare
) -> Iterator[Batch]:
    """Yields the micro-batches that `chosen` names. On a GPU the copy runs beside steps that are queued.

    Args:
        dataset: megatron-core's; its config says whether positions count from the start of each document.
        chosen: sample numbers of each micro-batch for every rank in `share.dp_ranks`.

    Raises:
        UserError: a token id that the vocabulary does not have; file, document and position are named.
    """
    own_positions: bool = dataset.config.reset_position_ids
    names = ("tokens", "labels", "loss_mask", *(["position_ids"] if own_positions else []))
    loader: DataLoader[Any] = DataLoader(
        _MicroBatches(dataset, names, share),
        batch_size=None,
        sampler=chosen,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # its own: each start of a loader draws a number, which would shift dropout
    )
    with deaf_children():
        samples = iter(loader)
    positions_S: Tensor | None = None
    for sample in samples:
        if "problem" in sample:
            raise UserError(sample["problem"])
        tokens, labels, mask, *positions = (sample[name].to(device, non_blocking=True) for name in names)
        gate_ids = GateIds(*sample["gate_ids"]).to(device) if "gate_ids" in sample else None
        if not own_positions and positions_S is None:
            whole_1S = torch.arange(tokens.shape[1] * share.cp_size, device=device)[None]
            positions_S = context_shard(whole_1S, share.cp_rank, share.cp_size)[0]
        own = positions[0] if positions_S is None else positions_S[None].expand(tokens.shape[0], -1)
        yield Batch(tokens, labels, mask.float(), own, gate_ids, int(sample.get("distinct_ids", 0)))

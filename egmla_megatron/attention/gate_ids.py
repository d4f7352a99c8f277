"""Which rows of the gating tables a micro-batch needs, known on the host before the step.

A token's gate depends on its id alone, so every distinct id is looked up, exchanged and projected once, and the tokens
index the result. Every member of a gate group plans for all members: it knows which samples they read, so neither the
ids nor their numbers have to be exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from egmla_megatron.attention.sum_by_row import pack_row_map

__all__ = ["GateIds", "GatePlan", "distinct_ids", "ids_of_one_rank", "padded_size"]

# W gate group size, B sequences, S tokens of a sequence, T = S * B tokens in sequence-first order,
# U rows that the own tokens use, R rows that this rank looks up in its columns of the tables


@dataclass(frozen=True)
class GateIds:
    """Row numbers of one micro-batch. Sizes are padded to few values; a padding row is never indexed.

    After an all-to-all the received rows are the U own ones (R = W * U: those of every member). After an all-gather
    they are the group's R, and `own_U` picks the own ones.
    """

    lookup_R: Tensor  # int64, ids to look up in this rank's columns
    own_U: Tensor | None  # int64, own rows among the received ones, None: all of them in order
    row_map: Tensor | None  # int64, own row of every token (`pack_row_map`), None: row t belongs to token t

    def to(self, device: torch.device) -> GateIds:
        """A copy on the device, not waited for."""
        moved = (None if x is None else x.to(device, non_blocking=True) for x in self.tensors)
        return GateIds(*moved)  # type: ignore[arg-type]

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The three fields in order."""
        return self.lookup_R, self.own_U, self.row_map

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the fields, 0 for None."""
        return tuple(0 if x is None else len(x) for x in self.tensors)

    def grown(self, sizes: tuple[int, ...], tokens: int) -> GateIds:
        """The same with more padding, to the lengths `sizes` of another micro-batch of `tokens` tokens."""
        if self.sizes == sizes or self.row_map is None:
            return self
        (looked_up, own, mapped), row_map = sizes, self.row_map
        # all-to-all: one block of rows for every member, each padded; else one block
        blocks = 1 if self.own_U is not None else len(self.lookup_R) // (len(row_map) - 2 * tokens - 1)
        lookup_WU = self.lookup_R.view(blocks, -1)
        lookup_WU = F.pad(lookup_WU, (0, looked_up // blocks - lookup_WU.shape[1]))
        own_U = None if self.own_U is None else _padded(self.own_U, own, looked_up - 1)
        row_map = torch.cat([row_map, row_map[-1:].expand(mapped - len(row_map))])
        return GateIds(lookup_WU.reshape(-1), own_U, row_map)


def padded_size(rows: int, tokens: int) -> int:
    """`rows` rounded up to a 32nd of the micro-batch: few shapes for allocators and graphs, 3% more rows at most."""
    step = max(8, tokens // 32)
    return -(-rows // step) * step


def distinct_ids(ids_N: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(distinct ids in ascending order [U], position of each id among them [N]); CPU tensors, int64."""
    present = torch.zeros(vocab_size, dtype=torch.bool)
    present[ids_N] = True
    distinct_U = present.nonzero().squeeze(1)
    rank = torch.empty(vocab_size, dtype=torch.int64)
    rank[distinct_U] = torch.arange(len(distinct_U))
    return distinct_U, rank[ids_N]


def _padded(ids: Tensor, size: int, value: int) -> Tensor:
    return torch.cat([ids, ids.new_full((size - len(ids),), value)])


@dataclass(frozen=True)
class GatePlan:
    """How a rank's gate group divides the work on a micro-batch.

    Args:
        members: for each member of the group in rank order, which tokens it holds; equal keys, equal tokens.
        mine: this rank's position in the group.
        exchange: all_to_all or all_gather.
        unique: look up distinct ids only.
        vocab_size: rows of a table.
    """

    members: tuple[tuple[int, int], ...]
    mine: int
    exchange: str
    unique: bool
    vocab_size: int

    def plan(self, tokens: dict[tuple[int, int], Tensor]) -> GateIds:
        """Token ids [B,S] of every key in `members` -> the rows this rank looks up and reads. On the host."""
        flat = {key: ids_BS.t().reshape(-1) for key, ids_BS in tokens.items()}
        if self.exchange == "all_gather" and len(self.members) > 1:
            return self._gathered(flat)
        return self._to_all(flat)

    def _to_all(self, flat: dict[tuple[int, int], Tensor]) -> GateIds:
        """Every member receives its own rows: looked up one member after the other, all padded to the longest."""
        if not self.unique:
            return GateIds(torch.cat([flat[key] for key in self.members]), None, None)
        found = {key: distinct_ids(ids_T, self.vocab_size) for key, ids_T in flat.items()}
        tokens = len(flat[self.members[self.mine]])
        rows = padded_size(max(len(distinct_U) for distinct_U, _ in found.values()), tokens)
        lookup_R = torch.cat([_padded(found[key][0], rows, 0) for key in self.members])
        return GateIds(lookup_R, None, pack_row_map(found[self.members[self.mine]][1], rows))

    def _gathered(self, flat: dict[tuple[int, int], Tensor]) -> GateIds:
        """Every member receives the rows of the whole group, each once, and picks its own."""
        mine = self.members[self.mine]
        tokens = len(flat[mine])
        keys = list(dict.fromkeys(self.members))
        if not self.unique:
            first = keys.index(mine) * tokens
            own_U = None if len(keys) == 1 else torch.arange(first, first + tokens)
            return GateIds(torch.cat([flat[key] for key in keys]), own_U, None)
        union, place = distinct_ids(torch.cat([flat[key] for key in keys]), self.vocab_size)
        size = padded_size(len(union) + 1, tokens)  # the last row is padding, so that padding can point there
        if len(keys) == 1:
            return GateIds(_padded(union, size, 0), None, pack_row_map(place, size))
        own, index_T = distinct_ids(place[keys.index(mine) * tokens :][:tokens], len(union))
        own_U = _padded(own, padded_size(len(own), tokens), size - 1)
        return GateIds(_padded(union, size, 0), own_U, pack_row_map(index_T, len(own_U)))


def ids_of_one_rank(ids_BS: Tensor, group: ProcessGroup, exchange: str) -> GateIds:
    """The rows of a micro-batch that nobody planned for, on its device: every token a row, ids gathered over the group.

    For models that are called with token ids only (inference, own training loops); costs one more collective.
    """
    ids_T = ids_BS.t().reshape(-1)
    tokens = len(ids_T)
    if group.size() == 1:
        return GateIds(ids_T, None, None)
    everyone_R = torch.empty(group.size() * tokens, dtype=ids_T.dtype, device=ids_T.device)
    dist.all_gather_into_tensor(everyone_R, ids_T, group=group)
    if exchange == "all_to_all":
        return GateIds(everyone_R, None, None)
    return GateIds(everyone_R, torch.arange(tokens, device=ids_T.device) + group.rank() * tokens, None)

"""Writes a checkpoint that holds weights alone, on one process without process groups, piece by piece.

The files are those that megatron-core's `dist_checkpointing` writes: torch's distributed format, the layers of one
parameter stacked in one tensor [layers, ...] of which each layer is a piece.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

__all__ = ["Piece", "write_weights"]

_COMMON = "common_state/shard_0_1"  # megatron-core's object with everything that is no tensor; there is nothing


@dataclass(frozen=True)
class Piece:
    """A part of one stored tensor, read when it is written."""

    key: str  # of the stored tensor
    whole: tuple[int, ...]  # its shape
    start: tuple[int, ...]  # where the piece begins in it
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class _Planner(SavePlanner):
    """One process writes all pieces."""

    def __init__(self, pieces: Iterable[Piece], dtype: torch.dtype):
        self.pieces = {MetadataIndex(piece.key, torch.Size(piece.start)): piece for piece in pieces}
        self.dtype = dtype

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Everything is known already."""

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(_COMMON), WriteItemType.BYTE_IO)]
        for index, piece in self.pieces.items():
            data = TensorWriteData(_chunk(piece), TensorProperties(self.dtype), torch.Size(piece.whole))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        entries: dict[str, Any] = {_COMMON: BytesStorageMetadata()}
        for piece in self.pieces.values():
            new = TensorStorageMetadata(TensorProperties(self.dtype), torch.Size(piece.whole), [])
            entries.setdefault(piece.key, new).chunks.append(_chunk(piece))
        return all_plans, Metadata(entries)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save([{}], buffer)
            return buffer
        piece = self.pieces[write_item.index]
        tensor = piece.read().to("cpu", self.dtype).contiguous()
        assert tensor.shape == piece.shape, (piece.key, tensor.shape, piece.shape)
        return tensor


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.shape))


def write_weights(pieces: Iterable[Piece], folder: Path, dtype: torch.dtype) -> None:
    """Writes all pieces into the folder, in `dtype`; the manifest and the marker are the caller's."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # takes seconds

    writer = dcp.FileSystemWriter(folder, sync_files=True)
    dcp.save({}, storage_writer=writer, planner=_Planner(pieces, dtype), no_dist=True)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))

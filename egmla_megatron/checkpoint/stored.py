"""The weights of a checkpoint of any layout, piece by piece, on one process without process groups.

Nothing is read until a tensor is indexed, and then only the region asked for: the pieces that ranks saved are mapped
into memory, so what a conversion holds is what it copies, however large the tensors and whatever the layout.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from egmla_megatron.errors import UserError
from egmla_megatron.model.names import canonical_name

__all__ = ["StoredTensor", "StoredWeights", "Window"]

LAYER = re.compile(r"^decoder\.layers\.(?:(\d+)\.)?(.+)$")
Index = int | slice


class StoredTensor:
    """One whole tensor in a checkpoint. `stored[:]` reads it, `stored[3]`, `stored[:, 2]` and so on a part of it.

    Steps other than 1, negative and missing dimensions' indices are not needed here and refused.
    """

    def __init__(self, folder: Path, key: str, entry: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]):
        self.folder, self.key, self.entry, self.places = folder, key, entry, places
        self.shape = tuple(entry.size)
        self.dtype = entry.properties.dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        wanted = list(index) if isinstance(index, tuple) else [index]
        wanted += [slice(None)] * (len(self.shape) - len(wanted))
        starts, sizes = [], []
        for part, size in zip(wanted, self.shape, strict=True):
            start, stop, step = part.indices(size) if isinstance(part, slice) else (part, part + 1, 1)
            if step != 1 or not 0 <= start <= stop <= size:
                raise IndexError(f"{self.key}: index {index} of shape {self.shape}")
            starts.append(start)
            sizes.append(stop - start)
        region = self._read(starts, sizes)
        for axis in reversed(range(len(wanted))):
            if isinstance(wanted[axis], int):
                region = region.select(axis, 0)
        return region

    def _read(self, starts: list[int], sizes: list[int]) -> Tensor:
        """The region that begins at `starts`; a mapped view where one saved piece holds all of it."""
        result: Tensor | None = None
        filled = 0
        for number, chunk in enumerate(self.entry.chunks):
            begin = [max(a, b) for a, b in zip(starts, chunk.offsets, strict=True)]
            ends = zip(starts, sizes, chunk.offsets, chunk.sizes, strict=True)
            length = [min(a + n, b + m) - c for (a, n, b, m), c in zip(ends, begin, strict=True)]
            if min(length, default=1) <= 0:
                continue
            piece = self._piece(number)
            for axis, (start, offset, size) in enumerate(zip(begin, chunk.offsets, length, strict=True)):
                piece = piece.narrow(axis, start - offset, size)
            if length == sizes:
                return piece
            result = torch.empty(sizes, dtype=self.dtype) if result is None else result
            target = result
            for axis, (start, origin, size) in enumerate(zip(begin, starts, length, strict=True)):
                target = target.narrow(axis, start - origin, size)
            target.copy_(piece)
            filled += piece.numel()
        if result is None or filled != result.numel():
            raise UserError(f"checkpoint: {self.folder} holds only a part of {self.key}; use another step_* folder")
        return result

    def _piece(self, number: int) -> Tensor:
        """What one rank saved, mapped (privately: nothing is written back)."""
        chunk = self.entry.chunks[number]
        place = self.places[MetadataIndex(self.key, chunk.offsets)]
        path = self.folder / place.relative_path
        try:
            with open(path, "rb") as file:
                file.seek(place.offset)
                window = io.BufferedReader(Window(file, place.offset, place.length))
                head = torch.load(window, map_location="meta", weights_only=True)
            # torch notes where in the file a storage lies that it did not read
            start = place.offset + head.untyped_storage()._checkpoint_offset
            size = head.untyped_storage().nbytes()
            raw = np.memmap(path, dtype=np.uint8, mode="c", offset=start, shape=(size,))
        except (OSError, RuntimeError, ValueError, AttributeError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"checkpoint: {path} cannot be read ({reason}); use another step_* folder") from error
        if tuple(head.shape) != tuple(chunk.sizes):
            raise UserError(f"checkpoint: {path}: {self.key} has shape {tuple(head.shape)}, expected {chunk.sizes}")
        flat = torch.from_numpy(raw).view(head.dtype)
        return flat.as_strided(head.shape, head.stride(), head.storage_offset())


class Window(io.RawIOBase):
    """`length` bytes of an open file from `start` on, as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int):
        self.file, self.start, self.length, self.at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        if at < 0:  # the file's own answer would be an OSError, as if the disk had failed
            raise ValueError(f"position {at} of a part of a file")
        self.at = at
        return at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.at)
        data = self.file.read(min(len(buffer), max(0, self.length - self.at)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


class _Layer:
    """One layer of a tensor in which megatron-core stacks the layers: [layers, ...] -> [...]."""

    def __init__(self, stack: StoredTensor, layer: int):
        self.stack, self.layer = stack, layer
        self.shape, self.dtype = stack.shape[1:], stack.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.stack[(self.layer, *(index if isinstance(index, tuple) else (index,)))]


class StoredWeights(Mapping[str, Any]):
    """The weights of a checkpoint folder by megatron-core name with the layer's number in it; read when indexed."""

    def __init__(self, folder: Path):
        try:
            metadata = dcp.FileSystemReader(str(folder)).read_metadata()
        except (OSError, EOFError, ValueError, LookupError, AttributeError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"checkpoint: {folder}/.metadata cannot be read ({reason}); use another step_* folder"
            ) from error
        places = {MetadataIndex(index.fqn, index.offset): place for index, place in metadata.storage_data.items()}
        self.tensors: dict[str, StoredTensor | _Layer] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata) or "optimizer." in key:  # also chained_N.optimizer.state...
                continue
            self.tensors.update(_named(key, StoredTensor(folder, key, entry, places)))

    def __getitem__(self, name: str) -> StoredTensor | _Layer:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The one that holds every weight exactly."""
        found = list({tensor.dtype for tensor in self.tensors.values()})
        widest = found[0]
        for dtype in found[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest


def _named(key: str, tensor: StoredTensor) -> dict[str, StoredTensor | _Layer]:
    """megatron-core stacks the layers of one parameter in a tensor [layers, ...]: name each."""
    match = LAYER.match(key)
    if match is None:
        return {key: tensor}
    name = canonical_name(match.group(2))
    if match.group(1) is not None:
        return {f"decoder.layers.{match.group(1)}.{name}": tensor}
    return {f"decoder.layers.{layer}.{name}": _Layer(tensor, layer) for layer in range(tensor.shape[0])}

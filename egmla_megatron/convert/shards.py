"""safetensors files of a bounded size with an index that says what is in them, written and read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from egmla_megatron.errors import UserError

__all__ = ["HfWeights", "write_json", "write_shards"]

INDEX = "model.safetensors.index.json"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """One JSON object, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, max_shard_bytes: int) -> None:
    """safetensors files of at most max_shard_bytes (or one tensor) and, for more than one, their index.

    The tensors of one file are held at a time. Each must own its storage.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    pending: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    total = 0

    def flush() -> None:
        shards.append(list(pending))
        try:
            save_file(pending, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # its word for a full disk
            raise OSError(str(error)) from error
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(held.nbytes for held in pending.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-1.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


class HfWeights(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder by name, mapped into memory; a file's header is read when it is opened.

    Raises:
        UserError: no safetensors, a broken file, or an index that is not what the files hold.
    """

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        index = folder / INDEX
        weight_map: dict[str, str] | None = None
        if index.is_file():
            try:
                weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index}: no index of safetensors files ({error}); copy the folder again") from error
        files = sorted(set(weight_map.values())) if weight_map is not None else ["model.safetensors"]
        self.files: dict[str, Any] = {}
        self.where: dict[str, str] = {}
        for file in files:
            try:
                self.files[file] = safe_open(folder / file, "pt")
            except FileNotFoundError as error:
                raise UserError(f"{folder}: got no {file}, expected an exported model; copy it again") from error
            except (SafetensorError, OSError) as error:
                raise UserError(f"{folder / file}: cannot be read ({error}); copy it again") from error
            self.where.update(dict.fromkeys(self.files[file].keys(), file))
        if weight_map is not None and weight_map != self.where:
            wrong = sorted(name for name, _ in weight_map.items() ^ self.where.items())
            raise UserError(f"{index}: does not say what the files hold, first {wrong[0]}; copy the folder again")

    def __getitem__(self, name: str) -> Tensor:
        return self.files[self.where[name]].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)

    def __contains__(self, name: object) -> bool:
        return name in self.where

    def shape(self, name: str) -> tuple[int, ...]:
        """Read from the header alone."""
        return tuple(self.files[self.where[name]].get_slice(name).get_shape())

    @property
    def dtype(self) -> torch.dtype:
        """The one that holds every tensor exactly."""
        found = {self[name].dtype for name in self}
        widest = found.pop()
        for dtype in found:
            widest = torch.promote_types(widest, dtype)
        return widest

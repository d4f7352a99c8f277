"""Bytes of a checkpoint that changed, found by the checksums that torch wrote with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from egmla_megatron.checkpoint.verify import changed_pieces, refuse_changed
from egmla_megatron.checkpoint.write_weights import Piece, write_weights
from egmla_megatron.errors import UserError

NUMBERS = torch.arange(4096, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's data: three tensors."""
    pieces = [Piece(name, (4096,), (0,), (4096,), lambda: NUMBERS) for name in ("a", "b", "c")]
    write_weights(pieces, tmp_path, torch.float32)
    return tmp_path


def data_file(folder: Path) -> Path:
    (path,) = folder.glob("*.distcp")
    return path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def changed(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    return [each.name for each in changed_pieces(folder, share, shares)]


def test_a_bit_of_a_weight_is_found_by_the_rank_that_looks_there(folder: Path) -> None:
    assert changed(folder) == []
    path = data_file(folder)
    flip(path, path.read_bytes().index(NUMBERS.numpy().tobytes()) + 4000)
    assert changed(folder) == [path.name]
    found = [changed(folder, share, 3) for share in range(3)]
    assert sorted(map(len, found)) == [0, 0, 1]


def test_so_are_a_broken_archive_and_metadata(folder: Path) -> None:
    path = data_file(folder)
    content = path.read_bytes()
    flip(path, content.rindex(b"PK\x05\x06"))  # the end of the last piece
    assert changed(folder) == [path.name]
    (folder / ".metadata").write_bytes(b"no pickle")
    assert changed(folder) == [".metadata"]


def test_a_changed_checkpoint_is_refused(folder: Path, world: Any) -> None:
    refuse_changed(folder, world)
    path = data_file(folder)
    flip(path, path.read_bytes().index(NUMBERS.numpy().tobytes()) + 4)
    with pytest.raises(UserError, match=rf"is damaged \({path.name}: 1 files with 1 pieces .*checkpoint\.verify=false"):
        refuse_changed(folder, world)

"""Weights read from a checkpoint cut up as many ranks do: region by region, in bounded memory, the 1.2B model whole."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.checkpoint.stored import StoredWeights
from egmla_megatron.checkpoint.write_weights import Piece, write_weights
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert import from_hf, to_hf
from egmla_megatron.convert.layouts import hf_shapes, layout_for
from egmla_megatron.convert.names import from_hf_tensors, table, to_hf_tensors
from egmla_megatron.convert.open_export import open_export
from egmla_megatron.convert.to_hf import export_hf
from egmla_megatron.model.count import count_parameters
from tests.hf_models import BASE

MIB = 2**20


def quarters(piece: Piece) -> Iterator[Piece]:
    """A piece cut in two along its first and its last dimension, as TP or a gate group and a pipeline do."""
    axes = sorted({0, len(piece.shape) - 1})
    pieces = [piece]
    for axis in axes:
        pieces = [half for each in pieces for half in halves(each, axis)]
    yield from pieces


def halves(piece: Piece, axis: int) -> Iterator[Piece]:
    middle = piece.shape[axis] // 2
    for first, size in ((0, middle), (middle, piece.shape[axis] - middle)):
        if size:
            start, shape = list(piece.start), list(piece.shape)
            start[axis], shape[axis] = start[axis] + first, size
            read = narrowed(piece, axis, first, size)
            yield Piece(piece.key, piece.whole, tuple(start), tuple(shape), read)


def narrowed(piece: Piece, axis: int, first: int, size: int) -> Any:
    return lambda: piece.read().narrow(axis, first, size)


def write_in_quarters(folder: Path, hf: dict[str, Tensor], model: ModelConfig) -> StoredWeights:
    pieces = from_hf.pieces_of(hf, model, layout_for(model))
    write_weights((part for piece in pieces for part in quarters(piece)), folder, torch.float32)
    return StoredWeights(folder)


def test_any_cut_reads_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf = {name: torch.randn_like(tensor) for name, tensor in ReferenceModel(BASE).state_dict().items()}
    stored = write_in_quarters(tmp_path, hf, BASE)
    for name, expected in from_hf_tensors(hf, BASE):
        assert torch.equal(stored[name][:], expected), name
    for name, tensor in to_hf_tensors(stored, BASE):
        assert torch.equal(tensor, hf[name]), name
    weight: Any = stored["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(weight[3:25, 7], weight[:][3:25, 7])


def test_memory_is_that_of_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(BASE, vocab_size=8192, num_layers=16, kv_emb_dim=256)  # tables of 128 MiB, of 8 MiB a layer
    hf = {name: torch.zeros(shape) for name, shape in hf_shapes(model).items()}
    stored = write_in_quarters(tmp_path / "checkpoint", hf, model)
    hf.clear()
    peaks = []

    def watched(tensors: Iterable[tuple[str, Tensor]], *rest: Any) -> None:
        before = held_bytes()

        def each() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                if name.endswith("gate_embed.weight"):
                    peaks.append(held_bytes() - before)
                yield name, tensor

        write(each(), *rest)

    write = to_hf.write_shards
    monkeypatch.setattr(to_hf, "write_shards", watched)
    folder = export_hf(stored, model, tmp_path / "hf", max_shard_bytes=16 * MIB)
    assert len(list(folder.glob("*.safetensors"))) > 8
    assert min(peaks) >= 8 * MIB and 16 * MIB <= max(peaks) < 40 * MIB  # a shard and what did not fit; not 128 MiB


def held_bytes() -> int:
    """Memory of all tensors of this process."""
    storages = (item.untyped_storage() for item in gc.get_objects() if type(item) is Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_the_1b2_model_by_names_shapes_and_index(tmp_path: Path) -> None:
    """All 1.8B parameters, as views of one element: nothing is allocated."""
    model = load_config("eg_mla_xlarge_kv128_emb512").model
    shapes = hf_shapes(model)
    counted = count_parameters(model)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == counted.total == 1_800_442_880
    element = torch.zeros((), dtype=torch.bfloat16)
    hf = {name: element.expand(shape) for name, shape in shapes.items()}
    with torch.device("meta"):
        mcore = dict(from_hf_tensors({name: tensor.to("meta") for name, tensor in hf.items()}, model))
    assert tuple(mcore["gate_table.weight"].shape) == (50304, 24, 512)
    assert {row.mcore for row in table(model)} == mcore.keys()
    assert {name: tuple(part.shape) for name, part in to_hf_tensors(mcore, model)} == shapes
    pieces = list(from_hf.pieces_of(hf, model, layout_for(model)))
    assert max(torch.Size(piece.shape).numel() for piece in pieces) == 50304 * 2048  # the embedding, never the tables
    for piece in pieces:  # every stored tensor is covered exactly once
        assert len(piece.start) == len(piece.whole) == len(piece.shape)
    sizes: dict[str, int] = {}
    for piece in pieces:
        sizes[piece.key] = sizes.get(piece.key, 0) + torch.Size(piece.shape).numel()
    assert sizes == {piece.key: torch.Size(piece.whole).numel() for piece in pieces}
    assert sum(sizes.values()) == counted.total


def test_export_and_its_index_hold_the_same(tmp_path: Path) -> None:
    hf = dict(ReferenceModel(BASE).state_dict())
    stored = write_in_quarters(tmp_path / "checkpoint", hf, BASE)
    weights, _, _ = open_export(export_hf(stored, BASE, tmp_path / "hf", max_shard_bytes=3000))
    assert weights.keys() == hf.keys() and all(torch.equal(weights[name], hf[name]) for name in hf)

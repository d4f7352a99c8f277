"""A Hugging Face folder -> a checkpoint that training continues from: weights alone, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from egmla_megatron.checkpoint.failures import SAVE_ERRORS, raise_unless_disk
from egmla_megatron.checkpoint.manifest import FORMAT, Manifest, is_complete, read_manifest, seal
from egmla_megatron.checkpoint.write_weights import Piece, write_weights
from egmla_megatron.cli import check_count
from egmla_megatron.config.load import architecture, to_dict
from egmla_megatron.config.schema import DataConfig, ModelConfig, RunConfig, RunSection, TrainConfig
from egmla_megatron.convert.layouts import Layout, hf_shapes
from egmla_megatron.convert.names import LAYER_COLUMNS, Row
from egmla_megatron.convert.new_folder import new_folder, require_disk
from egmla_megatron.convert.open_export import open_export
from egmla_megatron.convert.to_hf import has_vocab_rows, in_dtype
from egmla_megatron.errors import UserError
from egmla_megatron.folders import refuse_name, refuse_unwritable
from egmla_megatron.model.names import stored_name

__all__ = ["import_hf", "pieces_of"]

_LAYER = "decoder.layers."


def import_hf(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    step: int = 0,
) -> Path:
    """Writes the checkpoint folder `out_dir` for `checkpoint.load`; returns it.

    dtype: of the stored weights, None: the folder's. vocab_size: rows of the embeddings, None: the folder's; rows
    that are added are the mean of the others, rows that are cut off are lost. step: optimizer steps that count as
    done, for the schedule and the position in the data.
    """
    refuse_name("DST", str(out_dir))
    target = Path(out_dir)
    _refuse_target(target)
    check_count("--step", step, 0, 2**31 - 1)
    check_count("--vocab-size", vocab_size, 1, 2**24)
    weights, layout, model = open_export(hf_dir)
    resized = model if vocab_size is None else replace(model, vocab_size=vocab_size)
    dtype = dtype or weights.dtype
    elements = sum(torch.Size(shape).numel() for shape in hf_shapes(resized, layout).values())
    require_disk(target, elements * dtype.itemsize)
    tensors = _Resized(weights, resized.vocab_size, dtype)
    with new_folder(target) as folder:
        try:
            write_weights(pieces_of(tensors, resized, layout), folder, dtype)
        except SAVE_ERRORS as error:
            raise_unless_disk(error)
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]  # above it stands a traceback
            raise UserError(
                f"{target}: writing failed ({reason[:200]}); free space or choose another folder"
            ) from error
        seal(folder, _manifest(Path(hf_dir), resized, step))
    return target


def _refuse_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file, expected a folder to create; choose another name")
    converted = is_complete(target) and read_manifest(target).weights_only
    if target.is_dir() and any(target.iterdir()) and not converted:
        raise UserError(f"{target}: exists and was not made by from-hf; choose an empty or new folder")
    refuse_unwritable("DST", target.parent)


class _Resized(Mapping[str, Tensor]):
    """Tensors in `dtype` of which those with a row for every token have `rows` rows."""

    def __init__(self, tensors: Mapping[str, Tensor], rows: int, dtype: torch.dtype):
        self.tensors, self.rows, self.dtype = tensors, rows, dtype

    def __getitem__(self, name: str) -> Tensor:
        return in_dtype(name, self._resized(name), self.dtype)

    def _resized(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        missing = self.rows - tensor.shape[0]
        if not has_vocab_rows(name) or missing == 0:
            return tensor
        if missing < 0:
            return tensor[: self.rows]
        # these tokens never occur: logits of an average token, not 0, which may be among the largest
        mean = tensor.mean(dim=0, keepdim=True, dtype=torch.float32).to(tensor.dtype)
        return torch.cat((tensor, mean.expand(missing, -1)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def pieces_of(tensors: Mapping[str, Tensor], model: ModelConfig, layout: Layout) -> Iterable[Piece]:
    """What is written, in megatron-core's names: of a stack of layers one layer at a time."""
    with torch.device("meta"):
        shapes = {name: torch.empty(shape) for name, shape in hf_shapes(model, layout).items()}
    for row in layout.rows(model):
        if row.split is LAYER_COLUMNS:
            yield from _columns(tensors, model, row)
            continue
        shape = tuple(row.split.join([shapes[name] for name in row.hf], model).shape)
        if not row.mcore.startswith(_LAYER):
            yield Piece(row.mcore, shape, (0,) * len(shape), shape, _reader(tensors, model, row))
            continue
        layer, _, name = row.mcore.removeprefix(_LAYER).partition(".")
        key, whole = _LAYER + stored_name(name, model.attention), (model.num_layers, *shape)
        start = (int(layer), *(0 for _ in shape))
        yield Piece(key, whole, start, (1, *shape), _reader(tensors, model, row, stacked=True))


def _reader(
    tensors: Mapping[str, Tensor], model: ModelConfig, row: Row, *, stacked: bool = False
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        tensor = row.split.join([tensors[name] for name in row.hf], model)
        return tensor.unsqueeze(0) if stacked else tensor

    return read


def _columns(tensors: Mapping[str, Tensor], model: ModelConfig, row: Row) -> Iterable[Piece]:
    """The gating tables: [vocabulary, layers, columns], one layer at a time."""
    whole = (model.vocab_size, len(row.hf), model.kv_emb_dim)
    for layer, name in enumerate(row.hf):
        shape = (model.vocab_size, 1, model.kv_emb_dim)
        yield Piece(row.mcore, whole, (0, layer, 0), shape, _column_reader(tensors, name))


def _column_reader(tensors: Mapping[str, Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: tensors[name].unsqueeze(1)


def _manifest(source: Path, model: ModelConfig, step: int) -> Manifest:
    import megatron.core

    tokenizer = str(source.absolute()) if (source / "tokenizer_config.json").is_file() else ""
    train = TrainConfig(seq_length=min(TrainConfig.seq_length, model.max_position_embeddings))
    cfg = RunConfig(run=RunSection(name="from_hf"), model=model, data=DataConfig(tokenizer=tokenizer), train=train)
    return Manifest(
        format=FORMAT,
        step=step,
        consumed_samples=0,
        consumed_tokens=0,
        architecture=architecture(model),
        config=to_dict(cfg),
        layout={},
        data_fingerprint="",
        distributed_optimizer=False,
        implementation="",
        versions={"torch": torch.__version__, "megatron-core": megatron.core.__version__},
        written_unix_s=time.time(),
        weights_only=True,
    )

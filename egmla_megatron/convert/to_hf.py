"""Full weights -> a Hugging Face folder, tensor by tensor: what is in memory at a time is about one shard."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.hf_config import hf_config
from egmla_megatron.convert.hf_tokenizer import TokenizerInfo, write_tokenizer_files
from egmla_megatron.convert.layouts import Layout, hf_shapes, is_export, layout_for
from egmla_megatron.convert.model_card import model_card
from egmla_megatron.convert.names import Indexable, to_hf_tensors
from egmla_megatron.convert.new_folder import new_folder, require_disk
from egmla_megatron.convert.shards import write_json, write_shards
from egmla_megatron.errors import UserError
from egmla_megatron.folders import refuse_name, refuse_unwritable

__all__ = ["DEFAULT_SHARD_BYTES", "export_hf", "has_vocab_rows"]

DEFAULT_SHARD_BYTES = 4 * 2**30
# names of tensors with vocab_size rows end so, in every layout
_VOCAB_ROWS = (".embed_tokens.weight", ".gate_embed.weight", "lm_head.weight", ".wte.weight")


def has_vocab_rows(name: str) -> bool:
    """True for a tensor with a row for every token id."""
    return name.endswith(_VOCAB_ROWS)


def export_hf(
    weights: Mapping[str, Indexable],
    model: ModelConfig,
    out_dir: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    layout: Layout | None = None,
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Writes weights, configuration, model code, tokenizer and model card; returns the folder.

    weights: full Megatron tensors by name. tokenizer: folder with tokenizer files or a sentencepiece .model.
    vocab_size: cut the vocabulary padding off to this many rows; None keeps it. layout: natural unless given. card:
    facts for README.md. An older export in out_dir is replaced; any other content is a UserError.
    """
    refuse_name("DST", str(out_dir))
    target = Path(out_dir)
    refuse_foreign_folder(target)
    layout = layout or layout_for(model)
    exported = _without_padding(model, vocab_size)
    shapes = hf_shapes(exported, layout)
    require_disk(target, sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize)
    with new_folder(target) as folder:
        ids = TokenizerInfo(exported.vocab_size, None, None, None)
        if tokenizer is not None:
            ids = write_tokenizer_files(tokenizer, folder, max_length=model.max_position_embeddings)
            _require_room(exported, ids)
        tensors = to_hf_tensors(weights, model, list(layout.rows(model)))
        write_shards(_checked(tensors, shapes, dtype), folder, max_shard_bytes)
        _write_json_files(layout, exported, folder, dtype, ids)
        for name in layout.remote_code:
            shutil.copyfile(Path(__file__).parent / "hf" / name, folder / name)
        card_text = model_card(exported, shapes, card or {}, layout=layout.name, tokenizer=tokenizer is not None)
        (folder / "README.md").write_text(card_text, encoding="utf-8")
    return target


def refuse_foreign_folder(target: Path) -> None:
    """Refuse to replace anything but an older export, and what cannot be written."""
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file, expected a folder to create; choose another name")
    if target.is_dir() and any(target.iterdir()) and not is_export(target):
        raise UserError(f"{target}: exists and is no export of this project; choose an empty or new folder")
    refuse_unwritable("DST", target.parent)


def _without_padding(model: ModelConfig, rows: int | None) -> ModelConfig:
    if rows is None:
        return model
    if not 0 < rows <= model.vocab_size:
        raise UserError(f"vocab-size: got {rows}, allowed 1 to {model.vocab_size} (rows of the embedding)")
    return replace(model, vocab_size=rows)


def _require_room(model: ModelConfig, ids: TokenizerInfo) -> None:
    if ids.vocab_size > model.vocab_size:
        raise UserError(
            f"tokenizer: got {ids.vocab_size} ids, allowed at most the model's {model.vocab_size} rows; "
            "give the tokenizer of the training data"
        )


def _checked(
    tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Cuts the vocabulary padding, compares shapes and gives each tensor a storage of its own."""
    for name, full in tensors:
        expected = shapes[name]
        tensor = full[: expected[0]] if has_vocab_rows(name) else full
        if tuple(tensor.shape) != expected:
            raise UserError(
                f"{name}: got shape {tuple(full.shape)}, the configuration says {expected}; "
                "give the configuration that the weights were made with"
            )
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        if dtype == torch.float16 and not torch.isfinite(tensor).all():
            raise UserError(f"{name}: holds values that fp16 cannot (above {torch.finfo(dtype).max:.0f}); take bf16")
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        yield name, tensor if whole else tensor.clone()


def _write_json_files(layout: Layout, model: ModelConfig, folder: Path, dtype: torch.dtype, ids: TokenizerInfo) -> None:
    token_ids = {name: getattr(ids, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    known = {name: value for name, value in token_ids.items() if value is not None}
    # the classes of transformers have ids of their own where none are given, so that there they are said to be none
    config_ids = known if layout.remote_code else token_ids
    architecture = layout.config(model)
    dtype_name = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", hf_config(architecture, dtype=dtype_name, token_ids=config_ids))
    write_json(folder / "generation_config.json", known)

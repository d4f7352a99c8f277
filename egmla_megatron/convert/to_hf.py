"""Full weights -> a Hugging Face folder.

The folder is written under a temporary name beside the target and renamed at the end, so a killed export never looks
complete. Tensors are taken one by one; what is in memory at a time is about one shard.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.hf_config import hf_config, read_hf_config
from egmla_megatron.convert.hf_tokenizer import TokenizerInfo, write_tokenizer_files
from egmla_megatron.convert.model_card import model_card
from egmla_megatron.convert.names import to_hf_tensors
from egmla_megatron.errors import UserError

__all__ = ["DEFAULT_SHARD_BYTES", "export_hf", "hf_shapes", "verify_hf"]

DEFAULT_SHARD_BYTES = 4 * 2**30
REMOTE_CODE = (
    "configuration_egmla.py",
    "cache_egmla.py",
    "attention_egmla.py",
    "layers_egmla.py",
    "modeling_egmla.py",
)
_ROWS_PER_WORD = (".embed_tokens.weight", ".gate_embed.weight", "lm_head.weight")  # tensors with vocab_size rows


def hf_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all Hugging Face tensors of a model, without allocating them."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in ReferenceModel(model).state_dict().items()}


def export_hf(
    weights: Mapping[str, Tensor],
    model: ModelConfig,
    out_dir: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    tokenizer_vocab_size: int | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Writes weights, configuration, model code, tokenizer and model card; returns the folder.

    weights: full Megatron tensors by name. tokenizer: folder with tokenizer files or a sentencepiece .model.
    tokenizer_vocab_size: cut the vocabulary padding off to this many rows; None keeps it. card: facts
    for README.md. An older export in out_dir is replaced; any other content is a UserError.
    """
    target = Path(out_dir)
    _refuse_foreign_folder(target)
    exported = _without_padding(model, tokenizer_vocab_size)
    shapes = hf_shapes(exported)
    _require_disk(target, shapes, dtype)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        ids = TokenizerInfo(exported.vocab_size, None, None, None)
        if tokenizer is not None:
            ids = write_tokenizer_files(tokenizer, partial, max_length=model.max_position_embeddings)
            _require_room(exported, ids)
        tensors = _checked(to_hf_tensors(weights, model), shapes, dtype)
        _write_shards(tensors, partial, max_shard_bytes)
        _write_json_files(exported, partial, dtype, ids)
        for name in REMOTE_CODE:
            shutil.copyfile(Path(__file__).parent / "hf" / name, partial / name)
        (partial / "README.md").write_text(model_card(exported, shapes, card or {}), encoding="utf-8")
        _move_into_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _refuse_foreign_folder(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file, expected a folder to create; choose another name")
    if target.is_dir() and any(target.iterdir()):
        try:
            read_hf_config(target)
        except UserError as error:
            raise UserError(f"{target}: exists and is no EG-MLA export; choose an empty or new folder") from error


def _without_padding(model: ModelConfig, rows: int | None) -> ModelConfig:
    if rows is None:
        return model
    if not 0 < rows <= model.vocab_size:
        raise UserError(f"tokenizer_vocab_size: got {rows}, allowed 1 to {model.vocab_size} (rows of the embedding)")
    return replace(model, vocab_size=rows)


def _require_room(model: ModelConfig, ids: TokenizerInfo) -> None:
    if ids.vocab_size > model.vocab_size:
        raise UserError(
            f"tokenizer: got {ids.vocab_size} ids, allowed at most the model's {model.vocab_size} rows; "
            "give the tokenizer of the training data"
        )


def _require_disk(target: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    existing = next(folder for folder in target.absolute().parents if folder.exists())
    needed = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(f"{target}: got {free >> 20} MiB free, the export needs {needed >> 20} MiB; free some space")


def _checked(
    tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Cuts the vocabulary padding, compares shapes and gives each tensor a storage of its own."""
    for name, full in tensors:
        expected = shapes[name]
        tensor = full[: expected[0]] if name.endswith(_ROWS_PER_WORD) else full
        if tuple(tensor.shape) != expected:
            raise UserError(
                f"{name}: got shape {tuple(full.shape)}, the configuration says {expected}; "
                "give the configuration that the weights were made with"
            )
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        yield name, tensor if whole else tensor.clone()


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, max_shard_bytes: int) -> None:
    """safetensors files of at most max_shard_bytes (or one tensor) and, for more than one, their index."""
    from safetensors.torch import save_file

    pending: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    total = 0

    def flush() -> None:
        shards.append(list(pending))
        save_file(pending, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
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
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_json_files(model: ModelConfig, folder: Path, dtype: torch.dtype, ids: TokenizerInfo) -> None:
    candidates = {name: getattr(ids, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    token_ids = {name: value for name, value in candidates.items() if value is not None}
    _write_json(folder / "config.json", hf_config(model, dtype=str(dtype).removeprefix("torch."), token_ids=token_ids))
    _write_json(folder / "generation_config.json", token_ids)


def _move_into_place(partial: Path, target: Path) -> None:
    """Renames the finished folder; an older export steps aside first and is deleted last."""
    older = target.with_name(f".{target.name}.older-{os.getpid()}")
    if target.exists():
        target.rename(older)
    partial.rename(target)
    shutil.rmtree(older, ignore_errors=True)


@torch.no_grad()
def verify_hf(hf_dir: str | Path, reference: Callable[[Tensor], Tensor], ids_BS: Tensor) -> dict[str, float]:
    """Logits of the exported model (fp32) against `reference(ids)` on the same ids.

    Returns max_abs and mean_abs difference over all logits, and greedy_agreement: the share of positions with the
    same most likely token. A reference with vocabulary padding is compared on the rows that were exported.
    """
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(str(hf_dir), trust_remote_code=True, dtype=torch.float32).eval()
    got = exported(ids_BS, use_cache=False).logits
    expected = reference(ids_BS).float()[..., : got.shape[-1]]
    difference = (got - expected).abs()
    agreement = (got.argmax(-1) == expected.argmax(-1)).float().mean()
    return {
        "max_abs": difference.max().item(),
        "mean_abs": difference.mean().item(),
        "greedy_agreement": agreement.item(),
    }

"""What `tools/convert_checkpoint.py` does, apart from reading the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from egmla_megatron.checkpoint.manifest import Manifest, find_checkpoint, read_manifest
from egmla_megatron.checkpoint.stored import StoredWeights
from egmla_megatron.config.load import from_dict
from egmla_megatron.convert.layouts import layout_for
from egmla_megatron.convert.to_hf import DEFAULT_SHARD_BYTES, export_hf
from egmla_megatron.convert.verify import Comparison, verify_export
from egmla_megatron.errors import UserError
from egmla_megatron.report.read import evaluation_at

__all__ = ["DTYPES", "Export", "convert_from_hf", "convert_to_hf", "shard_bytes"]

DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNITS = {"": 2**20, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_FROM_TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Export:
    """How a checkpoint is exported."""

    dtype: str = "auto"  # see DTYPES; auto: as the checkpoint stores the weights
    tokenizer: str | None = None  # None: data.tokenizer of the run, empty: none
    vocab_size: str = ""  # rows to keep, `tokenizer` for as many as it has ids, empty: all
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    layout: str = ""  # see convert/layouts.py, empty: the natural one
    verify: bool = False


def shard_bytes(text: str) -> int:
    """Bytes of `--max-shard-size`: a number of MiB, or a number with a unit (5GB, 500MiB)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match.group(2).upper()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size < 1:
        raise UserError(f"max-shard-size: got {text!r}, allowed MiB or a size such as 500MB, 5GB, 4GiB")
    return size


def convert_to_hf(src: str | Path, dst: str | Path, export: Export) -> Comparison | None:
    """Exports a checkpoint (or the newest of a run folder) to `dst` and prints where.

    Returns:
        With `verify` the comparison with megatron-core's model.
    """
    path = find_checkpoint(Path(src))
    manifest = read_manifest(path)
    model = from_dict(manifest.config, str(path)).model
    weights = StoredWeights(path)
    dtype = DTYPES[export.dtype] or weights.dtype
    tokenizer = _tokenizer_of_run(manifest) if export.tokenizer is None else export.tokenizer
    rows = _vocabulary(export.vocab_size, tokenizer)
    folder = export_hf(
        weights,
        model,
        dst,
        tokenizer=tokenizer or None,
        dtype=dtype,
        vocab_size=rows,
        max_shard_bytes=export.max_shard_bytes,
        layout=layout_for(model, export.layout),
        card=_facts(path, manifest),
    )
    print(f"wrote {folder} ({path.name}, {str(dtype).removeprefix('torch.')})")
    if not export.verify:
        return None
    return verify_export(path, folder, replace(model, vocab_size=rows or model.vocab_size), dtype)


def _tokenizer_of_run(manifest: Manifest) -> str:
    source: str = manifest.config["data"]["tokenizer"]
    if source and not Path(source).exists():
        raise UserError(
            f"tokenizer: the run's data.tokenizer {source} is not there; give --tokenizer PATH, or --no-tokenizer"
        )
    return source


def _vocabulary(wanted: str, tokenizer: str) -> int | None:
    """Rows of the exported embeddings, None for all."""
    if not wanted:
        return None
    if wanted == _FROM_TOKENIZER:
        if not tokenizer:
            raise UserError("vocab-size: got tokenizer, but there is none; give --tokenizer or a number")
        from egmla_megatron.data.tokenizer import load_tokenizer

        return load_tokenizer(tokenizer).vocab_size
    if not wanted.isdecimal():
        raise UserError(f"vocab-size: got {wanted!r}, allowed a number of rows or {_FROM_TOKENIZER!r}")
    return int(wanted)


def _facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Rows of the model card's training table."""
    if manifest.weights_only:
        return {}
    facts = {"optimizer steps": f"{manifest.step:,}", "training tokens": f"{manifest.consumed_tokens:,}"}
    found = evaluation_at(path.parent.parent, manifest.step)
    if found is not None:
        facts["validation loss (nats per token)"] = f"{found['val_loss']:.4f} at step {found['step']:,}"
        facts["validation perplexity"] = f"{found['val_ppl']:.2f} over {found['tokens']:,} tokens"
    return facts


def convert_from_hf(src: str, dst: str, *, dtype: str = "auto", vocab_size: int | None = None, step: int = 0) -> Path:
    """Makes a checkpoint of weights alone from an exported folder, and prints how training goes on from it."""
    from egmla_megatron.convert.from_hf import import_hf  # it imports megatron-core, which takes seconds

    folder = import_hf(src, dst, dtype=DTYPES[dtype], vocab_size=vocab_size, step=step)
    print(f"wrote {folder}; train from it with checkpoint.load={folder} (optimizer fresh, step {step})")
    return folder

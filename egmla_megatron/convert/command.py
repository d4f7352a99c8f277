"""What `tools/convert_checkpoint.py to-hf` does once the checkpoint is read: export, report, verify."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.names import to_hf_tensors
from egmla_megatron.convert.to_hf import export_hf, verify_hf
from egmla_megatron.errors import UserError

__all__ = ["DTYPES", "convert_to_hf", "reference_of"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_VERIFY_TOKENS = 128  # length of the two random sequences that are compared


def reference_of(
    weights: Mapping[str, Tensor], model: ModelConfig, dtype: torch.dtype = torch.float32
) -> ReferenceModel:
    """The oracle with a checkpoint's weights, in fp32; `dtype` rounds them first as an export in that dtype does."""
    with torch.device("meta"):
        reference = ReferenceModel(model)
    state = {name: tensor.to("cpu", dtype).float() for name, tensor in to_hf_tensors(weights, model)}
    reference.load_state_dict(state, assign=True)
    return reference.eval()


def convert_to_hf(
    weights: Mapping[str, Tensor],
    model: ModelConfig,
    facts: Mapping[str, Any],
    dst: str | Path,
    *,
    dtype_name: str = "bf16",
    tokenizer: str | None = None,
    tokenizer_vocab_size: int | None = None,
    max_shard_mib: int = 4096,
    verify: bool = False,
) -> dict[str, float] | None:
    """Exports to `dst` and prints where; with verify also the comparison with the oracle, which is returned.

    facts: rows of the model card's training table.
    """
    if max_shard_mib < 1:
        raise UserError(f"max-shard-size: got {max_shard_mib}, allowed 1 MiB or more")
    dtype = DTYPES[dtype_name]
    folder = export_hf(
        weights,
        model,
        dst,
        tokenizer=tokenizer,
        dtype=dtype,
        tokenizer_vocab_size=tokenizer_vocab_size,
        max_shard_bytes=max_shard_mib * 2**20,
        card=facts,
    )
    print(f"wrote {folder}")
    if not verify:
        return None
    length = min(_VERIFY_TOKENS, model.max_position_embeddings)
    words = tokenizer_vocab_size or model.vocab_size
    ids_BS = torch.randint(words, (2, length), generator=torch.Generator().manual_seed(0))
    result = verify_hf(folder, reference_of(weights, model, dtype), ids_BS)
    print(", ".join(f"{name} {value:.3g}" for name, value in result.items()))
    return result

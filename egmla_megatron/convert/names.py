"""The one table that maps Megatron's tensors to Hugging Face's and back.

`table(model)` lists, for every full (unsharded) Megatron tensor, the Hugging Face tensors that it holds and how it is
cut into them. Both directions read the same rows, so a round trip is bit-exact. Tensors are only indexed, and one
after the other, so that they may lie in a file; nothing is copied unless it is really rearranged.

Shape legend: H heads, d head size, L layers, W vocabulary, E gating embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.errors import UserError

__all__ = [
    "HALVES",
    "LAYER_COLUMNS",
    "QKV_HEADS",
    "WHOLE",
    "Indexable",
    "Row",
    "Split",
    "cut_qkv",
    "from_hf_tensors",
    "join_qkv",
    "require_names",
    "table",
    "to_hf_tensors",
]

NAMED_AT_MOST = 4  # tensors listed in an error message


class Indexable(Protocol):
    """What a tensor and one that still lies in a file have in common."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any, /) -> Tensor: ...


@dataclass(frozen=True)
class Split:
    """How one Megatron tensor is cut into Hugging Face tensors, and the inverse.

    cut: reads one part after the other.
    """

    name: str
    cut: Callable[[Indexable, ModelConfig], Iterator[Tensor]]
    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]


def join_qkv(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """q, k, v of [H * d, ...] -> [H * 3 * d, ...] in the order q, k, v within each head."""
    heads = [part.unflatten(0, (model.num_attention_heads, -1)) for part in parts]
    return torch.stack(heads, dim=1).flatten(0, 2)


def cut_qkv(tensor: Indexable, model: ModelConfig) -> Iterator[Tensor]:
    """[H * 3 * d, ...] -> q, k, v of [H * d, ...]."""
    heads = tensor[:].unflatten(0, (model.num_attention_heads, 3, -1))
    return (heads[:, index].flatten(0, 1) for index in range(3))


def _cut_halves(tensor: Indexable, model: ModelConfig) -> Iterator[Tensor]:
    middle = tensor.shape[0] // 2
    return (tensor[part] for part in (slice(0, middle), slice(middle, 2 * middle)))


def _cut_columns(tensor: Indexable, model: ModelConfig) -> Iterator[Tensor]:
    """[W, L, E] -> L times [W, E]."""
    return (tensor[:, layer] for layer in range(tensor.shape[1]))


WHOLE = Split("whole", lambda tensor, model: iter([tensor[:]]), lambda parts, model: parts[0])
HALVES = Split("halves", _cut_halves, lambda parts, model: torch.cat(tuple(parts)))
QKV_HEADS = Split("qkv_heads", cut_qkv, join_qkv)
LAYER_COLUMNS = Split("layer_columns", _cut_columns, lambda parts, model: torch.stack(tuple(parts), dim=1))


@dataclass(frozen=True)
class Row:
    """One Megatron tensor, the Hugging Face tensors in it (in order) and the rule that cuts it."""

    mcore: str
    hf: tuple[str, ...]
    split: Split = WHOLE


def _attention_rows(model: ModelConfig, leads: bool) -> Iterator[Row]:
    """Rows of one latent-attention layer, names relative to self_attention / self_attn.

    leads: the layer has the latent of its group of `kv_group_size` layers; the others read it.
    """
    if model.q_lora_rank:
        yield Row("linear_q_down_proj.weight", ("q_a_proj.weight",))
        yield Row("q_layernorm.weight", ("q_a_layernorm.weight",))
        yield Row("linear_q_up_proj.weight", ("q_b_proj.weight",))
    else:
        yield Row("linear_q_proj.weight", ("q_proj.weight",))
    if leads:
        yield Row("linear_kv_down_proj.weight", ("kv_a_proj_with_mqa.weight",))
        yield Row("kv_layernorm.weight", ("kv_a_layernorm.weight",))
    if model.gated:
        yield Row("linear_kv_up_proj.up.weight", ("kv_b_proj.weight",))
        yield Row("linear_kv_up_proj.gate_proj_weight", ("gate_proj.weight",))
        if model.gate_norm:
            yield Row("linear_kv_up_proj.gate_norm_weight", ("gate_norm.weight",))
            yield Row("linear_kv_up_proj.gate_norm_bias", ("gate_norm.bias",))
    else:
        yield Row("linear_kv_up_proj.weight", ("kv_b_proj.weight",))
    yield Row("linear_proj.weight", ("o_proj.weight",))


def _mla_layer(model: ModelConfig, layer: int) -> Iterator[Row]:
    """Rows of one layer, names relative to the layer."""
    yield Row("input_layernorm.weight", ("input_layernorm.weight",))
    for row in _attention_rows(model, layer % model.kv_group_size == 0):
        yield Row(f"self_attention.{row.mcore}", tuple(f"self_attn.{name}" for name in row.hf), row.split)
    yield Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",))
    yield Row("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), HALVES)
    yield Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",))


def _mha_layer() -> Iterator[Row]:
    """Rows of one layer of the MHA baseline, where everything has a bias."""
    for kind in ("weight", "bias"):
        qkv = tuple(f"self_attn.{name}_proj.{kind}" for name in "qkv")
        yield Row(f"input_layernorm.{kind}", (f"input_layernorm.{kind}",))
        yield Row(f"self_attention.linear_qkv.{kind}", qkv, QKV_HEADS)
        yield Row(f"self_attention.linear_proj.{kind}", (f"self_attn.o_proj.{kind}",))
        yield Row(f"pre_mlp_layernorm.{kind}", (f"post_attention_layernorm.{kind}",))
        yield Row(f"mlp.linear_fc1.{kind}", (f"mlp.up_proj.{kind}",))
        yield Row(f"mlp.linear_fc2.{kind}", (f"mlp.down_proj.{kind}",))


def table(model: ModelConfig) -> Iterator[Row]:
    """All rows of a model, layer by layer."""
    mha = model.attention == "mha"
    yield Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    if mha:
        yield Row("embedding.position_embeddings.weight", ("model.embed_positions.weight",))
    if model.gated:
        tables = tuple(f"model.layers.{layer}.self_attn.gate_embed.weight" for layer in range(model.num_layers))
        yield Row("gate_table.weight", tables, LAYER_COLUMNS)
    for layer in range(model.num_layers):
        for row in _mha_layer() if mha else _mla_layer(model, layer):
            hf = tuple(f"model.layers.{layer}.{name}" for name in row.hf)
            yield Row(f"decoder.layers.{layer}.{row.mcore}", hf, row.split)
    yield Row("decoder.final_layernorm.weight", ("model.norm.weight",))
    if mha:
        yield Row("decoder.final_layernorm.bias", ("model.norm.bias",))
    if not model.tie_word_embeddings:
        yield Row("output_layer.weight", ("lm_head.weight",))


def require_names(side: str, got: Mapping[str, object], expected: set[str]) -> None:
    """Missing and unmapped tensors are the user's error: another architecture or an incomplete checkpoint."""
    problems = []
    for what, names in (("missing", expected - got.keys()), ("unmapped", got.keys() - expected)):
        if names:
            shown = ", ".join(sorted(names)[:NAMED_AT_MOST])
            more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
            problems.append(f"{len(names)} {what} ({shown}{more})")
    if problems:
        raise UserError(
            f"{side} tensors do not fit the model configuration: got {' and '.join(problems)}, "
            f"allowed exactly its {len(expected)} names; give the configuration that the weights were made with"
        )


def to_hf_tensors(
    mcore: Mapping[str, Indexable], model: ModelConfig, rows: Sequence[Row] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Full Megatron tensors -> (Hugging Face name, tensor), one after the other; rows: `table(model)` unless given.

    Raises UserError when a tensor is missing, unmapped or cannot be cut. A tied head is not yielded.
    """
    rows = list(table(model)) if rows is None else rows
    require_names("Megatron", mcore, {row.mcore for row in rows})
    for row in rows:
        yield from _cut(mcore[row.mcore], row, model)


def _cut(tensor: Indexable, row: Row, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    shape = tuple(tensor.shape)
    if row.split is LAYER_COLUMNS and (len(shape) != 3 or shape[1] != len(row.hf)):
        parts = shape[1] if len(shape) == 3 else 0
        raise UserError(
            f"{row.mcore}: got {parts} parts from shape {shape}, allowed {len(row.hf)}; "
            "give the configuration that the weights were made with"
        )
    try:
        yield from zip(row.hf, row.split.cut(tensor, model), strict=True)
    except (RuntimeError, IndexError) as error:
        raise UserError(f"{row.mcore}: shape {shape} cannot be cut by {row.split.name}") from error


def from_hf_tensors(
    hf: Mapping[str, Tensor], model: ModelConfig, rows: Sequence[Row] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors -> (Megatron name, full tensor), one after the other; the inverse of `to_hf_tensors`."""
    rows = list(table(model)) if rows is None else rows
    require_names("Hugging Face", hf, {name for row in rows for name in row.hf})
    for row in rows:
        yield row.mcore, row.split.join([hf[name] for name in row.hf], model)

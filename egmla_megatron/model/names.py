"""Parameter names that do not depend on the pipeline stage or on who computes the layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["canonical_name", "global_names", "stored_name", "unsharded_weights"]

EMBEDDING = "embedding.word_embeddings.weight"
# Transformer Engine fuses a norm into the linear layer behind it; the plain layers keep it apart
FUSED_NORMS = {
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
}


def canonical_name(name: str) -> str:
    """The name that the plain torch layers give the same parameter."""
    for fused, plain in FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name


def stored_name(name: str, attention: str) -> str:
    """Inverse of `canonical_name`, for a name behind the layer's number: checkpoints use the fused layers' names.

    attention: model.attention; only MHA has a linear layer behind the input norm that Transformer Engine fuses.
    """
    for fused, plain in FUSED_NORMS.items():
        if name.startswith(plain) and (attention == "mha" or plain != "input_layernorm."):
            return fused + name.removeprefix(plain)
    return name


def global_names(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters of a chunk with the layer's number in the model; a tied output layer is the embedding.

    The gating tables of the chunk's layers are one parameter, so every chunk of a stage has a `gate_table.weight`.
    """
    for name, parameter in module.named_parameters():
        if name == "output_layer.weight" and getattr(parameter, "shared_embedding", False):
            name = EMBEDDING
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            layer: Any = module.get_submodule(".".join(parts[: at + 1]))
            parts[at] = str(int(layer.layer_number) - 1)
        yield ".".join(parts), parameter


def unsharded_weights(module: nn.Module) -> dict[str, Tensor]:
    """Canonical name -> detached weight of a model that one rank holds whole (TP 1, PP 1, W 1)."""
    return {canonical_name(name): parameter.detach() for name, parameter in global_names(module)}

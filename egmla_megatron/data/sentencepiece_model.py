"""The protobuf form of a sentencepiece model: pieces, scores and training settings."""

from __future__ import annotations

import importlib
from typing import Any

from egmla_megatron.errors import UserError

__all__ = ["parse_model"]


def parse_model(raw: bytes, name: str) -> Any:
    """The ModelProto of a .model file's bytes; UserError with `name` when it is none."""
    messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")  # generated code without types
    decode_error: Any = importlib.import_module("google.protobuf.message").DecodeError
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(raw)
    except decode_error as error:
        raise UserError(f"tokenizer: {name} is not a sentencepiece model; train or copy it again") from error
    return proto

"""In whose shape a model is exported: with the project's own model code, or as a class that transformers has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.config.check_model import check_model
from egmla_megatron.config.load import from_dict
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.deepseek_v3 import (
    deepseek_v3_config,
    model_config_from_deepseek_v3,
    refuse_as_deepseek_v3,
)
from egmla_megatron.convert.gpt2 import gpt2_config, gpt2_table, model_config_from_gpt2, refuse_as_gpt2
from egmla_megatron.convert.hf_config import EXPORTED_BY, egmla_config, model_config_from_hf
from egmla_megatron.convert.names import Row, from_hf_tensors, table, to_hf_tensors
from egmla_megatron.errors import UserError

__all__ = ["LAYOUTS", "Layout", "hf_shapes", "is_export", "layout_for", "layout_of_folder", "read_hf_config"]


@dataclass(frozen=True)
class Layout:
    """One shape of export. `name` is also its `model_type`."""

    name: str
    rows: Callable[[ModelConfig], Iterable[Row]]
    config: Callable[[ModelConfig], dict[str, Any]]  # ModelConfig -> config.json without dtype and token ids
    model_config: Callable[[Mapping[str, Any]], ModelConfig]  # and back
    refuse: Callable[[ModelConfig], None]  # UserError for a model that this layout cannot hold
    remote_code: tuple[str, ...] = ()  # files of convert/hf that the export carries


def _refuse_as_egmla(model: ModelConfig) -> None:
    if model.attention != "mla":
        raise UserError(f"layout: got egmla for model.attention={model.attention}, allowed mla; leave --layout out")


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "egmla",
            table,
            egmla_config,
            model_config_from_hf,
            _refuse_as_egmla,
            (
                "configuration_egmla.py",
                "cache_egmla.py",
                "attention_egmla.py",
                "gates_egmla.py",
                "layers_egmla.py",
                "modeling_egmla.py",
            ),
        ),
        Layout("deepseek_v3", table, deepseek_v3_config, model_config_from_deepseek_v3, refuse_as_deepseek_v3),
        Layout("gpt2", gpt2_table, gpt2_config, model_config_from_gpt2, refuse_as_gpt2),
    )
}


def layout_for(model: ModelConfig, name: str = "") -> Layout:
    """The layout of that name, or the natural one: gpt2 for MHA, egmla for everything with latents.

    Raises:
        UserError: it cannot hold the model.
    """
    layout = LAYOUTS[name or ("gpt2" if model.attention == "mha" else "egmla")]
    layout.refuse(model)
    return layout


def hf_shapes(model: ModelConfig, layout: Layout | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all Hugging Face tensors of a model, without allocating them."""
    layout = layout or layout_for(model)
    with torch.device("meta"):
        mcore = dict(from_hf_tensors(ReferenceModel(model).state_dict(), model))
        return {name: tuple(tensor.shape) for name, tensor in to_hf_tensors(mcore, model, list(layout.rows(model)))}


def read_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """config.json of a folder; UserError when the folder holds no model that this project knows."""
    path = Path(hf_dir) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{hf_dir}: got no config.json, expected the folder of an exported model") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); export the model again") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in LAYOUTS:
        raise UserError(f"{path}: model_type: got {kind!r}, allowed {', '.join(LAYOUTS)}; give an exported folder")
    return config


def is_export(hf_dir: str | Path) -> bool:
    """True for a folder that this project wrote, and may replace."""
    try:
        config = read_hf_config(hf_dir)
    except UserError:
        return False
    return config["model_type"] == "egmla" or config.get("exported_by") == EXPORTED_BY


def layout_of_folder(config: Mapping[str, Any]) -> tuple[Layout, ModelConfig]:
    """The layout and the model that a config.json (from `read_hf_config`) describes.

    Raises:
        UserError: names the key that no model of this project has.
    """
    layout = LAYOUTS[config["model_type"]]
    fields = dataclasses.asdict(layout.model_config(config))
    model = from_dict({"model": fields}, "config.json").model  # types are looked at, too
    check_model(model)
    layout.refuse(model)
    return layout, model

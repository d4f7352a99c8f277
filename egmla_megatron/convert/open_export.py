"""Opens an exported folder, and refuses one whose files do not belong together."""

from __future__ import annotations

from pathlib import Path

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.layouts import Layout, hf_shapes, layout_of_folder, read_hf_config
from egmla_megatron.convert.names import require_names
from egmla_megatron.convert.shards import HfWeights
from egmla_megatron.errors import UserError

__all__ = ["open_export"]


def open_export(hf_dir: str | Path) -> tuple[HfWeights, Layout, ModelConfig]:
    """The tensors of an exported folder, checked against its config.json.

    Raises:
        UserError: names what is missing, too many, or of another shape than the configuration says.
    """
    folder = Path(hf_dir)
    layout, model = layout_of_folder(read_hf_config(folder))
    weights = HfWeights(folder)
    if model.num_layers > len(weights):  # said before a list of a billion names is made
        raise UserError(
            f"{folder}: got num_hidden_layers {model.num_layers} in config.json, allowed at most {len(weights)}, the "
            "number of tensors that are there; give the config.json that was exported with the weights"
        )
    shapes = hf_shapes(model, layout)
    wrong = [name for name in shapes if name in weights and weights.shape(name) != shapes[name]]
    if wrong:
        raise UserError(
            f"{folder}: {wrong[0]} has shape {weights.shape(wrong[0])}, config.json says {shapes[wrong[0]]}"
            f"{f' (and {len(wrong) - 1} more differ)' if len(wrong) > 1 else ''}; "
            "give the config.json that was exported with the weights"
        )
    require_names(f"{folder}: Hugging Face", weights, set(shapes))
    return weights, layout, model

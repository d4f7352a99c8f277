"""The latent cache of EG-MLA for Hugging Face transformers.

A flat file: exported checkpoints carry it beside their weights. What is stored per token is the normed latent
(C elements) and the rotated shared key (R elements) of each layer, and the token's id once.
"""

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .configuration_egmla import EgmlaConfig

__all__ = ["EgmlaCache"]


class EgmlaCache(Cache):
    """Latents and rotary keys per layer (or group of layers), token ids once.

    layers[i].keys: normed latents [B, T, C]; layers[i].values: rotated shared keys [B, T, R]; token_ids_BT.
    The growing layers of transformers work along the last two dimensions, so they hold these 3-d states as they are.
    """

    layers: list

    def __init__(self, config: EgmlaConfig):
        groups = config.num_hidden_layers // config.kv_group_size
        super().__init__(layers=[DynamicLayer() for _ in range(groups)])
        self.token_ids_BT: torch.Tensor | None = None

    def append_ids(self, ids_BS: torch.Tensor) -> None:
        """Adds the ids of the new tokens; once per forward pass."""
        self.token_ids_BT = ids_BS if self.token_ids_BT is None else torch.cat((self.token_ids_BT, ids_BS), dim=1)

    def nbytes(self) -> int:
        """Bytes of the latents and rotary keys; the ids are not counted."""
        layers = [layer for layer in self.layers if isinstance(layer, DynamicLayer)]
        return sum(state.nbytes for layer in layers for state in (layer.keys, layer.values) if state is not None)

    def reset(self) -> None:
        self.layers = [DynamicLayer() for _ in self.layers]  # older releases only zero what they hold
        self.token_ids_BT = None

    def crop(self, tokens_to_remove: int) -> None:
        """Negative: so many tokens go. Positive (until transformers 5.20 or so): so many stay."""
        super().crop(tokens_to_remove)
        if self.token_ids_BT is not None:
            self.token_ids_BT = self.token_ids_BT[:, : self.get_seq_length()]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.token_ids_BT is not None:
            self.token_ids_BT = self.token_ids_BT.index_select(0, beam_idx.to(self.token_ids_BT.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.token_ids_BT is not None:
            self.token_ids_BT = self.token_ids_BT.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        if self.token_ids_BT is not None:
            self.token_ids_BT = self.token_ids_BT[indices]

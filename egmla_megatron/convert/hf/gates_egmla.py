"""EG-MLA-A: finished gates of all token ids, looked up instead of computed.

A flat file: exported checkpoints carry it beside their weights. A token's gate depends on its id alone, so the
projection of a layer's gating table can be done once, for the whole vocabulary. The tables may stay in host memory:
then the rows of a batch's distinct ids travel to the device while the layer before computes.

Shape suffixes: B batch, T all tokens, W vocabulary, I distinct ids, U gated keys and values of all heads.
"""

import torch
from torch import nn
from torch.nn import functional

__all__ = ["EgmlaFinishedGates", "EgmlaGateFetch"]

_ROWS_AT_A_TIME = 8192


class EgmlaFinishedGates(nn.Module):
    """The gates of one layer for every token id, in place of its gating table and projection.

    table_WU: on the device of the weights a buffer that moves with the model, on the host a plain (pinned) tensor that
    stays there. Neither is saved.
    """

    @torch.no_grad()
    def __init__(self, embed: nn.Embedding, project: nn.Linear, on_host: bool):
        super().__init__()
        weight = embed.weight
        pinned = on_host and torch.cuda.is_available()
        device = torch.device("cpu") if on_host else weight.device
        shape = (weight.shape[0], project.weight.shape[0])
        table_WU = torch.empty(shape, dtype=weight.dtype, device=device, pin_memory=pinned)
        for start in range(0, weight.shape[0], _ROWS_AT_A_TIME):
            rows = slice(start, start + _ROWS_AT_A_TIME)
            table_WU[rows].copy_(project(weight[rows]))
        self.on_host = on_host
        if on_host:
            self.table_WU = table_WU
        else:
            self.register_buffer("table_WU", table_WU, persistent=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids_BT, self.table_WU)


class EgmlaGateFetch:
    """Brings the gates of one forward pass from host memory to the device, one layer ahead of their use."""

    def __init__(self, layers: list, ids_BT: torch.Tensor):
        self.layers = layers  # an EgmlaFinishedGates each
        self.device = ids_BT.device
        ids_I, self.place_BT = torch.unique(ids_BT, return_inverse=True)
        self.ids_I = ids_I.cpu()
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.next_IU = self._start(0)

    def _start(self, layer: int) -> torch.Tensor | None:
        if layer == len(self.layers):
            return None
        table_WU = self.layers[layer].table_WU
        if self.stream is None:
            return table_WU.index_select(0, self.ids_I)
        rows_IU = torch.empty((len(self.ids_I), table_WU.shape[1]), dtype=table_WU.dtype, pin_memory=True)
        torch.index_select(table_WU, 0, self.ids_I, out=rows_IU)
        with torch.cuda.stream(self.stream):
            return rows_IU.to(self.device, non_blocking=True)

    def take(self, layer: int, device: torch.device) -> torch.Tensor:
        """Gates [B, T, U] of a layer on its device; layers in order, each once. Starts the next layer's copy."""
        rows_IU = self.next_IU
        if rows_IU is None:
            raise RuntimeError(f"gates of layer {layer} were asked for behind the last layer's")
        if self.stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.stream)
            rows_IU.record_stream(here)
        self.next_IU = self._start(layer + 1)
        # layers may be spread over devices
        return functional.embedding(self.place_BT.to(device), rows_IU.to(device))

"""Gates, rotary positions, the causal mask and the attention kernels of EG-MLA for Hugging Face transformers.

A flat file: exported checkpoints carry it beside their weights. It needs torch alone, so no release of transformers
can change what it computes.

Shape suffixes: B batch, S new tokens, T all tokens, H heads, R rotary dims, P query and key dims, V value dims.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

__all__ = ["GATES", "attend", "causal_mask", "packed_sequences", "rotary_angles", "rotate_pairs"]

# (up-projected latent, gate) -> gated
GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"mul": torch.mul, "add": torch.add}


def rotary_angles(position_ids_BS: torch.Tensor, dims: int, theta: float) -> torch.Tensor:
    """Angles of the rotary pairs, fp32 [B, S, R / 2]: position * theta^(-2i / R)."""
    steps = torch.arange(0, dims, 2, device=position_ids_BS.device, dtype=torch.float32)
    return position_ids_BS.float().unsqueeze(-1) * theta ** (-steps / dims)


def rotate_pairs(x_BhSR: torch.Tensor, angles_BSr: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (2i, 2i + 1) of the last dimension; in fp32, returned in the dtype of x."""
    cos, sin = angles_BSr.cos().unsqueeze(1), angles_BSr.sin().unsqueeze(1)
    even, odd = x_BhSR.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x_BhSR.dtype)


def packed_sequences(position_ids_BS: torch.Tensor) -> torch.Tensor:
    """Number of the sequence that each token belongs to: a new one starts where positions do not go on by one."""
    return functional.pad((position_ids_BS.diff(dim=-1) != 1).cumsum(-1), (1, 0))


def causal_mask(
    attention_mask: torch.Tensor | None, start: int, new: int, device: torch.device, sequences_BS: torch.Tensor | None
) -> torch.Tensor | None:
    """What each of `new` queries behind `start` cached tokens may look at: boolean [B, 1, S, T], None for all before.

    attention_mask: [B, T], 0 for padding; one of four dimensions is taken as it is. sequences_BS: see
    `packed_sequences`; tokens of different sequences do not see each other.
    """
    total = start + new
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if attention_mask is not None and attention_mask.shape[-1] != total:
        raise ValueError(f"attention_mask: got {attention_mask.shape[-1]} columns, allowed {total}, cached and new")
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # a trace must not depend on values
    if attention_mask is not None and not traced and bool(attention_mask.all()):
        attention_mask = None
    if attention_mask is None and sequences_BS is None and (start == 0 or new == 1):
        return None
    keys_T = torch.arange(total, device=device)
    queries_S1 = keys_T[start:, None]
    mask_BST = (keys_T <= queries_S1).unsqueeze(0)
    if attention_mask is not None:
        mask_BST = mask_BST & attention_mask.bool().unsqueeze(1)
    if sequences_BS is not None:
        mask_BST = mask_BST & (sequences_BS.unsqueeze(1) == sequences_BS.unsqueeze(2))
    return (mask_BST | (keys_T == queries_S1)).unsqueeze(1)  # padding sees itself: a row of nothing would give NaN


def attend(
    query_BHSP: torch.Tensor,
    key_BHTP: torch.Tensor,
    value_BHTV: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    dropout: float,
    with_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """([B, S, H, V], weights or None); mask as from `causal_mask`, or additive. With weights in plain products."""
    new = query_BHSP.shape[2]
    if not with_weights:
        out_BHSV = functional.scaled_dot_product_attention(
            query_BHSP, key_BHTP, value_BHTV, mask, dropout, is_causal=mask is None and new > 1, scale=scale
        )
        return out_BHSV.transpose(1, 2), None
    scores_BHST = query_BHSP @ key_BHTP.transpose(-1, -2) * scale
    if mask is None and new > 1:
        mask = torch.ones(new, new, dtype=torch.bool, device=query_BHSP.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores_BHST = scores_BHST.masked_fill(~mask, torch.finfo(scores_BHST.dtype).min)
    elif mask is not None:
        scores_BHST = scores_BHST + mask
    weights_BHST = scores_BHST.softmax(dim=-1, dtype=torch.float32).to(query_BHSP.dtype)
    dropped_BHST = functional.dropout(weights_BHST, p=dropout, training=dropout > 0)
    return (dropped_BHST @ value_BHTV).transpose(1, 2), weights_BHST

"""The sizes of one micro-batch on one device, and the linear layers that it passes through."""

from __future__ import annotations

from dataclasses import dataclass

from egmla_megatron.attention.gate_ids import padded_size
from egmla_megatron.attention.head_sizes import HeadSizes
from egmla_megatron.config.schema import ModelConfig, RunConfig

__all__ = ["Linear", "Sizes", "linears", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """Elements and bytes of a micro-batch of an (EG-)MLA model."""

    model: ModelConfig
    sequences: int
    length: int  # tokens of a sequence
    distinct: int  # ids, each of which at least one token has; 0: no gate
    rows: int  # that the gate is projected for: the distinct ids and padding
    element_bytes: int  # of a weight or an activation
    gradient_bytes: int  # of an element of the main gradients
    gradients_in_layers: bool  # the layers' weight gradients are added to the main gradients by their GEMMs

    @property
    def one_gradient(self) -> bool:
        """Whether the latent's down-projection adds its input gradient to that of the queries."""
        return self.gradients_in_layers and not self.model.q_lora_rank

    @property
    def tokens(self) -> int:
        """Of the micro-batch."""
        return self.sequences * self.length

    @property
    def heads(self) -> HeadSizes:
        """Elements per head."""
        return HeadSizes(self.model.qk_nope_head_dim, self.model.qk_rope_head_dim, self.model.v_head_dim)

    @property
    def key_width(self) -> int:
        """Of all heads' queries, or keys."""
        return self.model.num_attention_heads * (self.heads.nope + self.heads.rope)

    @property
    def value_width(self) -> int:
        """Of all heads' values."""
        return self.model.num_attention_heads * self.heads.v

    @property
    def kv_width(self) -> int:
        """Of what the latent is expanded to: all heads' keys without position, and values."""
        return self.model.num_attention_heads * (self.heads.nope + self.heads.v)


@dataclass(frozen=True)
class Linear:
    """x [rows, inputs] -> x W^T [rows, outputs], W [outputs, inputs]."""

    name: str
    count: int  # such layers in the model
    rows: int
    inputs: int
    outputs: int
    in_layer: bool  # of the blocks
    by_torch: bool = False  # else by the implementation's linear layers
    beside: bool = False  # its input gradient is added to that of another reader of x


def sizes_of(cfg: RunConfig, distinct_fraction: float, *, gradients_in_layers: bool) -> Sizes:
    """Of one micro-batch of a run.

    Args:
        distinct_fraction: distinct ids / tokens, above 0 and up to 1.
        gradients_in_layers: see `Sizes`.
    """
    tokens = cfg.train.micro_batch_size * cfg.train.seq_length
    distinct = max(1, round(tokens * distinct_fraction)) if cfg.model.gated else 0
    return Sizes(
        model=cfg.model,
        sequences=cfg.train.micro_batch_size,
        length=cfg.train.seq_length,
        distinct=distinct,
        rows=padded_size(distinct, tokens) if distinct else 0,
        element_bytes=cfg.train.element_bytes,
        gradient_bytes=cfg.parallel.grad_element_bytes,
        gradients_in_layers=gradients_in_layers,
    )


def linears(sizes: Sizes) -> list[Linear]:
    """In the order of a forward pass."""
    model, tokens = sizes.model, sizes.tokens
    hidden, layers, q_rank = model.hidden_size, model.num_layers, model.q_lora_rank
    down = model.kv_lora_rank + model.qk_rope_head_dim
    found = [("q projection", tokens, hidden, sizes.key_width)]
    if q_rank:
        found = [("q down-projection", tokens, hidden, q_rank), ("q up-projection", tokens, q_rank, sizes.key_width)]
    found += [
        ("kv down-projection", tokens, hidden, down),
        ("kv up-projection", tokens, model.kv_lora_rank, sizes.kv_width),
        ("gate projection", sizes.rows, model.kv_emb_dim, sizes.kv_width),
        ("output projection", tokens, sizes.value_width, hidden),
        ("MLP gate and up", tokens, hidden, 2 * model.intermediate_size),
        ("MLP down", tokens, model.intermediate_size, hidden),
    ]
    beside = {"kv down-projection"} if sizes.one_gradient else set()
    by_torch = {"gate projection", *beside}
    in_layers = [
        Linear(name, layers, rows, inputs, outputs, in_layer=True, by_torch=name in by_torch, beside=name in beside)
        for name, rows, inputs, outputs in found
        if name != "gate projection" or model.gated
    ]
    return [*in_layers, Linear("LM head", 1, tokens, hidden, model.vocab_size, in_layer=False, by_torch=True)]

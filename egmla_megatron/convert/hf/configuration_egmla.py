"""Configuration of EG-MLA (embedding-gated multi-head latent attention) for Hugging Face transformers.

A flat file: exported checkpoints carry it beside their weights and it imports nothing but transformers.
"""

from typing import ClassVar

from transformers import PretrainedConfig  # the name that every release has

__all__ = ["EgmlaConfig"]

GATES = ("mul", "add", "none")


class EgmlaConfig(PretrainedConfig):
    """Architecture of one EG-MLA (or, with `gate="none"`, plain MLA) language model. Sizes count elements."""

    model_type = "egmla"
    keys_to_ignore_at_inference: ClassVar = ["cache", "past_key_values"]

    def __init__(
        self,
        vocab_size: int = 50304,  # rows of the embedding and of every gating table, padding included
        hidden_size: int = 768,
        intermediate_size: int = 1920,  # width of the SwiGLU
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        max_position_embeddings: int = 1024,  # tokens seen in training
        q_lora_rank: int | None = 0,  # low rank of the queries, 0 or None: full rank without a norm
        kv_lora_rank: int = 64,  # the cached latent
        qk_nope_head_dim: int = 64,  # per head, without position
        qk_rope_head_dim: int = 64,  # per head of the queries, one shared key
        v_head_dim: int = 64,  # per head
        kv_emb_dim: int = 256,  # columns of a layer's gating table, 0 without a gate
        gate: str = "mul",  # see GATES
        gate_norm: bool = True,  # LayerNorm over all heads after the gate
        kv_group_size: int = 1,  # layers that share one latent; only 1 is implemented
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
        gate_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,  # std of linear weights and of the token embedding
        gate_table_init_std: float = 1.0,  # std of the gating tables
        attention_dropout: float = 0.0,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        **kwargs,
    ):
        own = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        for name, value in own.items():
            setattr(self, name, value)
        self.q_lora_rank = q_lora_rank or 0
        self._check()
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def _check(self) -> None:
        if self.gate not in GATES:
            raise ValueError(f"config.json: gate: got {self.gate!r}, allowed {', '.join(GATES)}")
        if (self.gate == "none") != (self.kv_emb_dim == 0):
            raise ValueError(f"config.json: kv_emb_dim: got {self.kv_emb_dim} with gate {self.gate!r}; none needs 0")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"config.json: qk_rope_head_dim: got {self.qk_rope_head_dim}, allowed even numbers")
        if self.kv_group_size != 1:
            raise ValueError(f"config.json: kv_group_size: got {self.kv_group_size}, this model code reads only 1")

    @property
    def num_key_value_heads(self) -> int:
        """Every head has its own expanded key and value."""
        return self.num_attention_heads

    @property
    def qk_head_dim(self) -> int:
        """Elements of one head's query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_cache_elements_per_token(self) -> int:
        """Latent and rotary key of all layers; the token ids come once per token on top."""
        return self.num_hidden_layers // self.kv_group_size * (self.kv_lora_rank + self.qk_rope_head_dim)

    @property
    def precomputed_gate_elements(self) -> int:
        """Elements of all finished gates after `precompute_gates` of the model."""
        if self.gate == "none":
            return 0
        per_token = self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return self.num_hidden_layers * self.vocab_size * per_token

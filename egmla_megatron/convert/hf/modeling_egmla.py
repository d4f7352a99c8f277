"""EG-MLA language model for Hugging Face transformers, with a cache of latents.

A flat file: exported checkpoints carry it beside their weights; it needs torch, transformers (4.56 or newer: of it
only names that all these releases have) and the configuration, cache, layer and attention files next to it.

Shape suffixes: B batch, S new tokens, T all tokens, D hidden size, r half the rotary dims.
"""

import math

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .attention_egmla import causal_mask, packed_sequences, rotary_angles
from .cache_egmla import EgmlaCache
from .configuration_egmla import EgmlaConfig
from .gates_egmla import EgmlaFinishedGates, EgmlaGateFetch
from .layers_egmla import EgmlaDecoderLayer, EgmlaGateProjection, EgmlaGateTable, EgmlaRMSNorm

__all__ = ["EgmlaCache", "EgmlaForCausalLM", "EgmlaModel", "EgmlaPreTrainedModel", "EgmlaRMSNorm"]

# transformers renamed `past_key_values` on its way through release 5
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def fill_normal(weight: torch.Tensor, std: float) -> None:
    """Normal initial values, unless the weight was loaded."""
    if not getattr(weight, "_is_hf_initialized", False):
        nn.init.normal_(weight, mean=0.0, std=std)


class EgmlaPreTrainedModel(PreTrainedModel):
    """What both heads share: names, capabilities and the initial weights."""

    config_class = EgmlaConfig
    config: EgmlaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EgmlaDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True

    def _init_weights(self, module):
        table_std = self.config.gate_table_init_std
        if isinstance(module, EgmlaGateTable):
            fill_normal(module.weight, table_std)
        elif isinstance(module, EgmlaGateProjection):
            fill_normal(module.weight, 1 / (table_std * math.sqrt(self.config.kv_emb_dim)))
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, *args, output_loading_info=False, **kwargs):
        """As the library's, but weights that do not fit config.json are an error, not a warning and random values."""
        strict = not kwargs.pop("ignore_mismatched_sizes", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
        if strict:
            refuse_keys("{} tensors have other shapes than", {describe(entry) for entry in info["mismatched_keys"]})
            tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
            without_head = {"lm_head.weight"} if isinstance(model, EgmlaModel) else set()
            refuse_keys("{} tensors are missing for", set(info["missing_keys"]) - tied)
            refuse_keys("{} tensors have no place in", set(info["unexpected_keys"]) - without_head)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args, **kwargs):
        if self.base_model.precomputed:
            raise ValueError("precomputed gates cannot be saved as weights; save the model before precompute_gates")
        return super().save_pretrained(*args, **kwargs)

    def precompute_gates(self, on_host=False):
        """EG-MLA-A: computes every layer's gates for the whole vocabulary once and drops tables and projections.

        Outputs stay the same; generation then looks gates up instead of multiplying. Costs
        `config.precomputed_gate_elements` elements in the weights' dtype: 1.9 GB for EG-MLA-Base, 9.9 GB for the 1.2B
        model in bf16. on_host: keep them in host memory; rows of the distinct ids in use are copied to the device one
        layer ahead. Call it last: behind it the model can neither be trained nor saved.

        Returns:
            Bytes of the gates.
        """
        base = self.base_model
        if self.config.gate == "none":
            raise ValueError("precompute_gates: this model has no gates")
        if base.precomputed:
            raise ValueError("precompute_gates: was called before")
        if self.training:
            raise ValueError("precompute_gates: got a model in training mode, allowed evaluation mode; call eval()")
        gates = [layer.self_attn.precompute_gates(on_host) for layer in base.layers]
        base.precomputed = gates
        return sum(each.table_WU.nbytes for each in gates)


def describe(entry):
    """A tensor whose shape does not fit: some releases give (name, its shape, the model's), some the name."""
    if isinstance(entry, str):
        return entry
    name, stored, expected = entry
    return f"{name} {tuple(stored)}, not {tuple(expected)}"


def refuse_keys(what, names):
    """An error that names the first tensors."""
    if names:
        shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise ValueError(
            f"{what.format(len(names))} the model that config.json describes: {shown}; use the config.json that was "
            "exported with the weights (ignore_mismatched_sizes=True loads them all the same)"
        )


class EgmlaModel(EgmlaPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: EgmlaConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(EgmlaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = EgmlaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.precomputed: list[EgmlaFinishedGates] = []  # see precompute_gates
        self.post_init()

    def _cache(self, cache, use_cache):
        """The cache to fill: the caller's, or a new one where one is wanted."""
        training = self.gradient_checkpointing and self.training  # layers run twice and would cache twice
        if cache is not None and training:
            raise ValueError("cache: got one while gradient checkpointing trains, allowed none")
        wanted = self.config.use_cache if use_cache is None else use_cache
        if cache is None and wanted and not training:
            return EgmlaCache(self.config)
        if cache is not None and not isinstance(cache, EgmlaCache):
            raise TypeError(f"cache: got {type(cache).__name__}, allowed EgmlaCache(model.config)")
        return cache

    def _with_weights(self, output_attentions):
        """True when attention runs in plain products, which give their weights."""
        kind = self.config._attn_implementation or "sdpa"
        if kind not in ("sdpa", "eager"):
            raise ValueError(f"attn_implementation: got {kind!r}, allowed sdpa, eager")
        return kind == "eager" or output_attentions

    def _fetch(self, ids_BT):
        """What brings precomputed gates from host memory, where they lie there."""
        if not self.precomputed:
            return None
        if self.training:
            raise ValueError("precomputed gates cannot be trained; load the model again")
        return EgmlaGateFetch(self.precomputed, ids_BT) if self.precomputed[0].on_host else None

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        use_cache=None,
        past_key_values=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        if input_ids is None:
            raise ValueError("EG-MLA needs input_ids: gates are looked up by token id (inputs_embeds may come on top)")
        output_attentions = asked(self.config, "output_attentions", output_attentions)
        output_hidden_states = asked(self.config, "output_hidden_states", output_hidden_states)
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        hidden_BSD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        start, new = 0 if cache is None else cache.get_seq_length(), input_ids.shape[1]
        sequences_BS = None
        if position_ids is None:
            position_ids = torch.arange(start, start + new, device=input_ids.device).unsqueeze(0)
        elif attention_mask is None and start == 0:
            sequences_BS = packed_sequences(position_ids)
        mask = causal_mask(attention_mask, start, new, input_ids.device, sequences_BS)
        angles_BSr = rotary_angles(position_ids, self.config.qk_rope_head_dim, self.config.rope_theta)
        if cache is not None:
            cache.append_ids(input_ids)
        fetch = self._fetch(input_ids if cache is None else cache.token_ids_BT)
        states, attentions = [hidden_BSD], []
        with_weights = self._with_weights(output_attentions)
        for layer in self.layers:
            hidden_BSD, weights = layer(hidden_BSD, input_ids, angles_BSr, mask, cache, with_weights, fetch)
            states.append(hidden_BSD)
            attentions.append(weights)
        states[-1] = hidden_BSD = self.norm(hidden_BSD)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden_BSD,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
            **{CACHE: cache},
        )
        return output if asked(self.config, "return_dict", return_dict) else output.to_tuple()


def asked(config: EgmlaConfig, name: str, value: bool | None) -> bool:
    """A switch of a call; what the configuration says where the call says nothing."""
    return bool(getattr(config, name, False) if value is None else value)


class EgmlaForCausalLM(EgmlaPreTrainedModel, GenerationMixin):
    """Language model with a (by default tied) head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: EgmlaConfig):
        super().__init__(config)
        self.model = EgmlaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """`generate` gets the latent cache instead of the library's cache of keys and values."""
        if model_kwargs.get(CACHE) is not None or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            kind = generation_config.cache_implementation
            raise ValueError(f"cache_implementation: got {kind!r}, allowed none: EG-MLA brings its own latent cache")
        model_kwargs[CACHE] = EgmlaCache(self.config)
        return None

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        past_key_values=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        kwargs.pop("cache_position", None)  # older releases count the tokens for the model; the cache knows
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        # the last N positions (0: all), or those that a tensor of indices names
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )
        return output if asked(self.config, "return_dict", return_dict) else output.to_tuple()

"""README.md of an exported model: what it is, how large, what it cost, how to load it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.model.count import kv_cache_elements_per_token

__all__ = ["TESTED", "model_card"]

TESTED = ("4.56.2", "4.57.6", "5.0.0", "5.12.0", "5.24.0")  # transformers that ran the tests of hf/ and to_hf


def _latents(model: ModelConfig) -> dict[str, Any]:
    gate_norm = "LayerNorm" if model.gated and model.gate_norm else "none"
    return {
        "head size: position-free + rotary / value": (
            f"{model.qk_nope_head_dim} + {model.qk_rope_head_dim} / {model.v_head_dim}"
        ),
        "latent / gating embedding": f"{model.kv_lora_rank} / {model.kv_emb_dim}",
        "gate / norm behind it": f"{model.gate} / {gate_norm}",
    }


def _architecture(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], layout: str) -> dict[str, Any]:
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    tables = sum(count for name, count in counts.items() if name.endswith(".gate_embed.weight"))
    total = sum(counts.values())
    cached = kv_cache_elements_per_token(model)
    if layout == "deepseek_v3":  # its class keeps what it expanded
        head = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
        cached = model.num_layers * model.num_attention_heads * head
    parts = f"{total - tables:,} + {tables:,} = {total:,}" if tables else f"{total:,}"
    return {
        "layers / hidden / heads": f"{model.num_layers} / {model.hidden_size} / {model.num_attention_heads}",
        **(_latents(model) if model.attention == "mla" else {"head size": str(model.v_head_dim)}),
        "vocabulary": f"{model.vocab_size:,}",
        "context": f"{model.max_position_embeddings:,} tokens",
        f"parameters{': active + gating tables' if tables else ''}": parts,
        "cache": f"{cached:,} elements per token",
    }


def _title(model: ModelConfig) -> str:
    if model.attention == "mha":
        return "Multi-head attention, the GPT-2 shape"
    return "EG-MLA: embedding-gated multi-head latent attention" if model.gated else "Multi-head latent attention"


def _markdown_table(rows: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _use(layout: str, tokenizer: bool) -> str:
    """Code that loads the folder, and what it needs."""
    own = layout == "egmla"
    trust = ", trust_remote_code=True" if own else ""
    ids = """tokenizer = AutoTokenizer.from_pretrained("this folder"{trust})
ids = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=32)[0]))"""
    no_ids = "print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=32))"
    imports = "from transformers import AutoModelForCausalLM" + (", AutoTokenizer" if tokenizer else "")
    code = ids.replace("{trust}", trust) if tokenizer else no_ids
    notes = {
        "egmla": f"The model code in this folder needs transformers 4.56 or newer (tested: {', '.join(TESTED)}).\n"
        "Its cache holds latents, not keys and values.",
        "deepseek_v3": "transformers' own DeepSeek-V3 class computes this model (all layers dense). Its cache holds "
        "keys and\nvalues of every head, not latents.",
        "gpt2": "transformers' own GPT-2 class computes this model, with the exact GELU.",
    }
    return f"""```python
{"" if tokenizer else "import torch" + chr(10)}{imports}

model = AutoModelForCausalLM.from_pretrained("this folder"{trust})
{code}
```

{notes[layout]}"""


def model_card(
    model: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    facts: Mapping[str, Any],
    *,
    layout: str = "egmla",
    tokenizer: bool = True,
) -> str:
    """Markdown text. shapes: all tensors of the model; facts: rows of the training table, may be empty."""
    training = f"\n## Training\n\n{_markdown_table(facts)}\n" if facts else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {_title(model)}

{_markdown_table(_architecture(model, shapes, layout))}
{training}
## Use

{_use(layout, tokenizer)}
"""

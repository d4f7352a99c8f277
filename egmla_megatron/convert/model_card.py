"""README.md of an exported model: what it is, how large, what it cost, how to load it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from egmla_megatron.config.schema import ModelConfig

__all__ = ["TESTED", "model_card"]

TESTED = ("4.56.2", "4.57.6", "5.0.0", "5.12.0", "5.24.0")  # transformers that ran the tests of hf/ and to_hf


def _architecture(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    tables = sum(count for name, count in counts.items() if name.endswith(".gate_embed.weight"))
    total = sum(counts.values())
    cached = model.num_layers // model.kv_group_size * (model.kv_lora_rank + model.qk_rope_head_dim)
    return {
        "layers / hidden / heads": f"{model.num_layers} / {model.hidden_size} / {model.num_attention_heads}",
        "head size: position-free + rotary / value": (
            f"{model.qk_nope_head_dim} + {model.qk_rope_head_dim} / {model.v_head_dim}"
        ),
        "latent / gating embedding": f"{model.kv_lora_rank} / {model.kv_emb_dim}",
        "gate / norm behind it": f"{model.gate} / {'LayerNorm' if model.gated and model.gate_norm else 'none'}",
        "vocabulary": f"{model.vocab_size:,}",
        "context": f"{model.max_position_embeddings:,} tokens",
        "parameters: active + gating tables": f"{total - tables:,} + {tables:,} = {total:,}",
        "cache": f"{cached:,} elements per token",
    }


def _markdown_table(rows: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def model_card(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], facts: Mapping[str, Any]) -> str:
    """Markdown text. shapes: all tensors of the model; facts: rows of the training table, may be empty."""
    title = "EG-MLA: embedding-gated multi-head latent attention" if model.gated else "Multi-head latent attention"
    training = f"\n## Training\n\n{_markdown_table(facts)}\n" if facts else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {title}

{_markdown_table(_architecture(model, shapes))}
{training}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("this folder", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("this folder", trust_remote_code=True)
ids = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=32)[0]))
```

The model code in this folder needs transformers 4.56 or newer (tested: {", ".join(TESTED)}).
Its cache holds latents, not keys and values.
"""

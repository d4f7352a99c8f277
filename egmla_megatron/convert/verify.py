"""Whether an exported model computes what the checkpoint's own model computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.layouts import read_hf_config

__all__ = ["Comparison", "compare", "hf_logits", "load_model", "random_ids", "verify_export"]

_TOKENS = 128  # length of the two random sequences that are compared
_TOLERANCE = 1e-3  # of the largest logit; fp32 models of 24 layers differ by about 1e-5


@dataclass(frozen=True)
class Comparison:
    """Two models' logits on the same ids."""

    max_abs: float
    mean_abs: float
    greedy_agreement: float  # share of positions with the same most likely token
    largest: float  # absolute logit

    @property
    def equal(self) -> bool:
        """True up to the rounding of fp32."""
        return self.max_abs <= _TOLERANCE * max(1.0, self.largest)  # false for nan

    def __str__(self) -> str:
        return f"max_abs {self.max_abs:.3g}, mean_abs {self.mean_abs:.3g}, greedy_agreement {self.greedy_agreement:.4g}"


def compare(got: Tensor, expected: Tensor) -> Comparison:
    """Logits [B, S, vocabulary]; a reference with vocabulary padding is compared on the rows that were exported."""
    expected = expected[..., : got.shape[-1]]
    difference = (got - expected).abs()
    agreement = (got.argmax(-1) == expected.argmax(-1)).float().mean()
    return Comparison(difference.max().item(), difference.mean().item(), agreement.item(), expected.abs().max().item())


def load_model(hf_dir: str | Path, **options: Any) -> Any:
    """The model of an exported folder in evaluation mode; options go to `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    own = read_hf_config(hf_dir)["model_type"] == "egmla"  # the other layouts are classes of transformers
    return AutoModelForCausalLM.from_pretrained(str(hf_dir), trust_remote_code=own, **options).eval()


@torch.no_grad()
def hf_logits(hf_dir: str | Path, ids_BS: Tensor) -> Tensor:
    """Logits of an exported model, computed in fp32."""
    return load_model(hf_dir, dtype=torch.float32)(ids_BS, use_cache=False).logits


def random_ids(model: ModelConfig) -> Tensor:
    """The same two sequences of random ids every time."""
    length = min(_TOKENS, model.max_position_embeddings)
    return torch.randint(model.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))


def verify_export(checkpoint: str | Path, hf_dir: str | Path, model: ModelConfig, dtype: torch.dtype) -> Comparison:
    """Compares the export with megatron-core's own model on the same ids, prints it, and returns the comparison.

    Both compute in fp32, with the weights rounded to the export's dtype alike; what the rounding itself changes is
    printed beside it. One model is in memory at a time. model: the exported one (its vocabulary may be cut).
    """
    from egmla_megatron.convert.megatron_logits import megatron_logits

    ids_BS = random_ids(model)
    as_trained, rounded = megatron_logits(checkpoint, ids_BS, dtype)
    got = hf_logits(hf_dir, ids_BS)
    result, rounding = compare(got, rounded), compare(got, as_trained)
    print(f"verify: {result}")
    if rounding != result:
        print(f"verify, against the weights before rounding to {str(dtype).removeprefix('torch.')}: {rounding}")
    return result

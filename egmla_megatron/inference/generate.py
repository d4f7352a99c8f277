"""Text from an exported model folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from egmla_megatron.convert.hf_config import read_hf_config
from egmla_megatron.errors import UserError

__all__ = ["Sampling", "generate", "load_exported"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 64
    temperature: float = 0.8  # 0: always the most likely token
    top_p: float = 0.95  # share of the probability mass that is drawn from
    seed: int = 1234

    def check(self) -> None:
        """UserError for values that cannot be sampled with."""
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens: got {self.max_new_tokens}, allowed 1 or more")
        if not self.temperature >= 0:  # also nan
            raise UserError(f"temperature: got {self.temperature}, allowed 0 (most likely token) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: got {self.top_p}, allowed above 0 up to 1")


def load_exported(hf_dir: str | Path, *, dtype: torch.dtype | str = "auto", device: str = "") -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer) of an exported folder, on `device` (empty: a GPU if there is one)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read_hf_config(hf_dir)
    if not (Path(hf_dir) / "tokenizer_config.json").is_file():
        raise UserError(f"{hf_dir}: got no tokenizer_config.json; export the model with its tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(hf_dir), padding_side="left", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(str(hf_dir), trust_remote_code=True, dtype=dtype)
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval(), tokenizer


@torch.inference_mode()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], sampling: Sampling, *, num_samples: int = 1
) -> list[list[str]]:
    """Continuations of each prompt, without the prompt: [prompt][sample]. The same seed gives the same text.

    An empty prompt starts from the end-of-text token, behind which training documents begin.
    """
    sampling.check()
    if num_samples < 1 or not prompts:
        raise UserError(f"got {len(prompts)} prompts and {num_samples} samples of each, allowed 1 or more of both")
    if num_samples > 1 and sampling.temperature == 0:
        raise UserError(f"num_samples: got {num_samples} with temperature 0, allowed 1: all samples would be equal")
    texts = [prompt or tokenizer.eos_token for prompt in prompts]
    encoded = [
        [tokenizer.eos_token_id] if not prompt else tokenizer.encode(text, add_special_tokens=False)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    longest = max(len(ids) for ids in encoded)
    limit = model.config.max_position_embeddings
    if longest + sampling.max_new_tokens > limit:
        raise UserError(
            f"prompt of {longest} tokens plus max_new_tokens {sampling.max_new_tokens}: got "
            f"{longest + sampling.max_new_tokens}, allowed {limit} (the length of training); shorten one of them"
        )
    batch = tokenizer.pad({"input_ids": encoded}, padding=True, return_tensors="pt").to(model.device)
    choice: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    torch.manual_seed(sampling.seed)
    ids = model.generate(
        **batch,
        max_new_tokens=sampling.max_new_tokens,
        num_return_sequences=num_samples,
        pad_token_id=tokenizer.pad_token_id,
        **choice,
    )
    decoded = tokenizer.batch_decode(ids[:, longest:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [decoded[start : start + num_samples] for start in range(0, len(decoded), num_samples)]

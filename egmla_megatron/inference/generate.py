"""Text from an exported model folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from egmla_megatron.convert.layouts import read_hf_config
from egmla_megatron.convert.open_export import open_export
from egmla_megatron.convert.verify import load_model
from egmla_megatron.errors import UserError
from egmla_megatron.inference.stream import OrderedStream

__all__ = ["Sampling", "Usage", "cache_bytes", "generate", "load_exported"]

_MOST = 2**24  # tokens


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 64
    temperature: float = 0.8  # 0: always the most likely token
    top_p: float = 0.95  # share of the probability mass that is drawn from
    seed: int = 1234
    top_k: int = 0  # most likely tokens that are drawn from, 0: all

    def check(self) -> None:
        """UserError for values that cannot be sampled with."""
        if not 1 <= self.max_new_tokens <= _MOST:
            raise UserError(f"max_new_tokens: got {self.max_new_tokens}, allowed 1 to {_MOST}")
        if self.temperature != 0 and not 1e-4 <= self.temperature <= 1e4:  # also nan
            raise UserError(f"temperature: got {self.temperature}, allowed 0 (most likely token), or 0.0001 to 10000")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: got {self.top_p}, allowed above 0 up to 1")
        if not 0 <= self.top_k <= _MOST:
            raise UserError(f"top_k: got {self.top_k}, allowed 0 (all) to {_MOST}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed: got {self.seed}, allowed 0 to 2^63 - 1")

    def options(self) -> dict[str, Any]:
        """For `generate` of transformers."""
        if self.temperature == 0:
            return {"do_sample": False, "max_new_tokens": self.max_new_tokens}
        choice = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"do_sample": True, "max_new_tokens": self.max_new_tokens, **choice}


@dataclass
class Usage:
    """What generation took, summed over batches."""

    sequences: int = 0
    new_tokens: int = 0  # up to and with the end-of-text token
    seconds: float = 0.0
    cache_bytes: int = 0  # of the largest batch
    cache_tokens: int = 0  # sequences x cached tokens of that batch
    batches: list[int] = field(default_factory=list)  # sequences of each

    def __str__(self) -> str:
        rate = self.new_tokens / self.seconds if self.seconds else 0.0
        per_token = self.cache_bytes / self.cache_tokens if self.cache_tokens else 0.0
        return (
            f"{self.new_tokens} new tokens in {self.seconds:.2f} s: {rate:.1f} tokens/s; cache "
            f"{self.cache_bytes:,} bytes for {self.cache_tokens} tokens, {per_token:.0f} bytes per token"
        )


def load_exported(hf_dir: str | Path, *, dtype: torch.dtype | str = "auto", device: str = "") -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer) of an exported folder, on `device` (empty: a GPU if there is one).

    Raises:
        UserError: no export, no tokenizer, weights that are not those of config.json, a device that is not there.
    """
    from transformers import AutoTokenizer

    read_hf_config(hf_dir)
    if not (Path(hf_dir) / "tokenizer_config.json").is_file():
        raise UserError(f"{hf_dir}: got no tokenizer_config.json; export the model with its tokenizer")
    open_export(hf_dir)
    place = _device(device)
    own = read_hf_config(hf_dir)["model_type"] == "egmla"
    tokenizer = AutoTokenizer.from_pretrained(str(hf_dir), padding_side="left", trust_remote_code=own)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return load_model(hf_dir, dtype=dtype).to(place), tokenizer


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"device: got {name!r}, which cannot be used ({reason}); allowed cpu, cuda, cuda:N") from error
    return device


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    batch_size: int = 0,
    write: Callable[[str], None] | None = None,
    usage: Usage | None = None,
) -> list[list[str]]:
    """Continuations of each prompt, without the prompt: [prompt][sample]. The same seed and batches give the same text.

    An empty prompt starts from the end-of-text token, behind which training documents begin. batch_size: prompts at a
    time, 0: all. write: gets the text, prompts included, as it is generated. usage: is added to.
    """
    sampling.check()
    _check(prompts, num_samples, batch_size, sampling)
    _refuse_broken(prompts)
    encoded = [_encoded(tokenizer, prompt) for prompt in prompts]
    _refuse_long(model, encoded, sampling)
    torch.manual_seed(sampling.seed)
    results: list[list[str]] = []
    for begin in range(0, len(prompts), batch_size or len(prompts)):
        rows = slice(begin, begin + (batch_size or len(prompts)))
        titles = [prompt for prompt in prompts[rows] for _ in range(num_samples)]
        ends = _ends(model, tokenizer)
        stream = None if write is None else OrderedStream(tokenizer, titles, ends, write)
        started = time.perf_counter()
        ids, cache = _run(model, tokenizer, encoded[rows], sampling, num_samples, stream)
        if usage is not None:
            _count(usage, ids, ends, cache, time.perf_counter() - started)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        results += [texts[first : first + num_samples] for first in range(0, len(texts), num_samples)]
    return results


def _check(prompts: Sequence[str], num_samples: int, batch_size: int, sampling: Sampling) -> None:
    if num_samples < 1 or not prompts:
        raise UserError(f"got {len(prompts)} prompts and {num_samples} samples of each, allowed 1 or more of both")
    if num_samples > 1 and sampling.temperature == 0:
        raise UserError(f"num_samples: got {num_samples} with temperature 0, allowed 1: all samples would be equal")
    if batch_size < 0:
        raise UserError(f"batch_size: got {batch_size}, allowed 0 (all prompts at once) or more")


def _refuse_broken(prompts: Sequence[str]) -> None:
    """Bytes of a command line or escapes of a JSON file that are no text."""
    for prompt in prompts:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"prompt: got {prompt[:60]!r}, allowed text in UTF-8; write it anew") from error


def _encoded(tokenizer: Any, prompt: str) -> list[int]:
    # text of which the tokenizer keeps nothing is an empty prompt, too
    return tokenizer.encode(prompt, add_special_tokens=False) or [tokenizer.eos_token_id]


def _refuse_long(model: Any, encoded: Sequence[Sequence[int]], sampling: Sampling) -> None:
    longest = max(len(ids) for ids in encoded)
    limit = model.config.max_position_embeddings
    if longest + sampling.max_new_tokens > limit:
        raise UserError(
            f"prompt of {longest} tokens plus max_new_tokens {sampling.max_new_tokens}: got "
            f"{longest + sampling.max_new_tokens}, allowed {limit} (the length of training); shorten one of them"
        )


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """Ids behind which a sequence has ended."""
    found = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id} if found is None else set(found if isinstance(found, list) else [found])


@torch.inference_mode()
def _run(
    model: Any,
    tokenizer: Any,
    encoded: Sequence[Sequence[int]],
    sampling: Sampling,
    num_samples: int,
    stream: OrderedStream | None,
) -> tuple[Tensor, Any]:
    """One batch: (new ids [sequences, tokens], the cache)."""
    batch = tokenizer.pad({"input_ids": list(encoded)}, padding=True, return_tensors="pt").to(model.device)
    output = model.generate(
        **batch,
        **sampling.options(),
        num_return_sequences=num_samples,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        streamer=stream,
    )
    cache = output["cache" if "cache" in output else "past_key_values"]  # its name changed in transformers 5
    return output.sequences[:, batch["input_ids"].shape[1] :].cpu(), cache


def _count(usage: Usage, ids_BS: Tensor, ends: set[int], cache: Any, seconds: float) -> None:
    usage.sequences += ids_BS.shape[0]
    usage.seconds += seconds
    usage.batches.append(ids_BS.shape[0])
    for row in ids_BS.tolist():
        usage.new_tokens += next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
    held = cache_bytes(cache)
    if held > usage.cache_bytes:
        usage.cache_bytes, usage.cache_tokens = held, ids_BS.shape[0] * cache.get_seq_length()


def cache_bytes(cache: Any) -> int:
    """Bytes of the states in a cache, measured on its tensors: latents, or keys and values of transformers' caches."""
    states: Iterator[Any] = (state for layer in cache.layers for state in (layer.keys, layer.values))
    return sum(state.nbytes for state in states if state is not None)

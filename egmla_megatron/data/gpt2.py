"""GPT-2's byte-level BPE through tiktoken and gigatoken, from its two files: no network, no Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from egmla_megatron.errors import UserError

__all__ = ["END_OF_TEXT", "fast_encoder", "find_gpt2_files", "gpt2_encoding", "load_gpt2_files", "ranks_digest"]

END_OF_TEXT = "<|endoftext|>"
_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # OpenAI's names, Hugging Face's names


def find_gpt2_files(folder: Path) -> tuple[Path, Path] | None:
    """(vocabulary, merges) when the folder holds a tokenizer of GPT-2's kind, else None.

    Hugging Face names count only when tokenizer_config.json, where there is one, names GPT-2's class: other models use
    the same file names with another way to cut text.
    """
    for vocabulary, merges in ((folder / a, folder / b) for a, b in _PAIRS):
        if vocabulary.is_file() and merges.is_file() and _says_gpt2(folder):
            return vocabulary, merges
    return None


def _says_gpt2(folder: Path) -> bool:
    """Whether the Hugging Face files, where there are any, describe plain GPT-2 and nothing on top of it."""
    config, whole = (_read_object(folder / name) for name in ("tokenizer_config.json", "tokenizer.json"))
    if config is None:
        return whole is None and not (folder / "added_tokens.json").exists()
    added = list((config.get("added_tokens_decoder") or {}).values()) + list((whole or {}).get("added_tokens") or [])
    special = [config.get("eos_token") or END_OF_TEXT, *added]
    names = {item["content"] if isinstance(item, dict) else item for item in special}
    named = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    return named == "GPT2Tokenizer" and names == {END_OF_TEXT} and not config.get("add_prefix_space")


def _read_object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"tokenizer: {path} is not valid JSON ({error}); copy the tokenizer again") from error
    if not isinstance(content, dict):
        raise UserError(f"tokenizer: {path}: got a {type(content).__name__}, expected a JSON object; copy it again")
    return content


def load_gpt2_files(vocabulary: Path, merges: Path) -> Any:
    """A tiktoken Encoding. UserError when the files do not belong together or lack the end-of-text token."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    try:
        ids = json.loads(vocabulary.read_text(encoding="utf-8"))
        ranks = data_gym_to_mergeable_bpe_ranks(str(merges), str(vocabulary))
    except (ValueError, AssertionError, KeyError) as error:
        raise UserError(
            f"tokenizer: {vocabulary} and {merges.name} do not belong together or are damaged "
            f"({type(error).__name__}); copy both from the same tokenizer"
        ) from error
    if END_OF_TEXT not in ids:
        raise UserError(f"tokenizer: {vocabulary} has no end-of-document token {END_OF_TEXT}; use GPT-2's own files")
    return gpt2_encoding(ranks, ids[END_OF_TEXT])


def gpt2_encoding(ranks: dict[bytes, int], end_of_text: int) -> Any:
    """A tiktoken Encoding that cuts text as GPT-2 does before it applies merges."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    return tiktoken.Encoding(
        name="gpt2 from its ranks",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: end_of_text},
    )


def fast_encoder(ranks: dict[bytes, int]) -> Any:
    """gigatoken's tokenizer of the same vocabulary: twenty times as fast, ids only (no special tokens). For one thread.

    It keeps the pieces of text that it has seen. Ranks must have no gap, as those of `load_gpt2_files` have none.
    """
    import gigatoken

    lines = (b64encode(piece) + b" %d\n" % rank for piece, rank in sorted(ranks.items(), key=lambda item: item[1]))
    with NamedTemporaryFile(suffix=".tiktoken") as file:
        file.writelines(lines)
        file.flush()
        return gigatoken.Tokenizer.from_tiktoken(file.name, pretokenizer="gpt2")


def ranks_digest(ranks: dict[bytes, int]) -> str:
    """sha256 that depends on the vocabulary alone, not on the files that it came from."""
    return hashlib.sha256(repr(sorted(ranks.items())).encode()).hexdigest()

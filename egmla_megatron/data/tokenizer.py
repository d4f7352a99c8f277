"""Tokenizers: one small interface over sentencepiece models, Hugging Face folders and GPT-2.

`load_tokenizer` gives a `Tokenizer`; `TokenIds` is what training needs of one (data are tokens already). Both can be
handed to megatron-core's dataset configuration, which reads eod, pad, vocab_size and unique_identifiers.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from egmla_megatron.data.gpt2 import (
    END_OF_TEXT,
    fast_encoder,
    find_gpt2_files,
    gpt2_encoding,
    load_gpt2_files,
    ranks_digest,
)
from egmla_megatron.errors import UserError

__all__ = ["GPT2", "TokenIds", "Tokenizer", "load_tokenizer"]

GPT2 = "gpt2"
_NO_PAD = -1  # megatron-core's mark for: nothing in the data is padding
_CHUNK_CHARS = 50_000  # sentencepiece adds scores in fp32: short pieces of text keep the sums exact


@dataclass(frozen=True)
class TokenIds:
    """The part of a tokenizer that training on finished tokens needs."""

    eod: int  # end-of-document id
    vocab_size: int  # ids are below this
    pad: int = _NO_PAD

    @property
    def eos(self) -> int:
        """The end-of-document id under its other name."""
        return self.eod

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """What distinguishes cached sample indices; no path, so a moved data set keeps its cache."""
        return OrderedDict(kind="token_ids", eod=self.eod, vocab_size=self.vocab_size)


class Tokenizer(ABC):
    """Text <-> ids. Made by `load_tokenizer`; can be pickled, so that worker processes need not load it again."""

    def __init__(self, *, kind: str, name: str, sha256: str, eod: int, vocab_size: int) -> None:
        self.kind = kind  # sentencepiece, huggingface or gpt2
        self.name = name  # path or name that it was loaded from
        self.sha256 = sha256  # of the file(s) that define it
        self.eod = eod
        self.vocab_size = vocab_size
        self.pad = _NO_PAD

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens; text that looks like a special token is text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens give nothing."""

    def encode_array(self, text: str) -> np.ndarray:
        """The same ids as a row of integers, as fast as the tokenizer can. Not for several threads at once."""
        return np.asarray(self.encode(text), dtype=np.int64)

    @property
    def eos(self) -> int:
        """The end-of-document id under its other name."""
        return self.eod

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """What distinguishes cached sample indices; no path, so a moved tokenizer keeps its cache."""
        return OrderedDict(kind=self.kind, sha256=self.sha256, eod=self.eod, vocab_size=self.vocab_size)


class _SentencePiece(Tokenizer):
    def __init__(self, processor: Any, *, name: str, sha256: str) -> None:
        super().__init__(
            kind="sentencepiece",
            name=name,
            sha256=sha256,
            eod=processor.eos_id(),
            vocab_size=processor.vocab_size(),
        )
        self.processor = processor
        pieces = processor.id_to_piece(list(range(processor.vocab_size())))
        self.splits_at_newlines = "\n" not in "".join(pieces)

    def encode(self, text: str) -> list[int]:
        chunks = _line_chunks(text) if self.splits_at_newlines else [text]
        return [token for chunk in chunks for token in self.processor.encode(chunk)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.processor.decode([int(token) for token in ids])
        return text


class _HuggingFace(Tokenizer):
    def __init__(self, tokenizer: Any, *, name: str, sha256: str) -> None:
        super().__init__(
            kind="huggingface", name=name, sha256=sha256, eod=tokenizer.eos_token_id, vocab_size=len(tokenizer)
        )
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        plain = [int(token) for token in ids]
        text: str = self.tokenizer.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class _GPT2(Tokenizer):
    def __init__(self, encoding: Any, *, name: str) -> None:
        super().__init__(
            kind=GPT2,
            name=name,
            sha256=ranks_digest(encoding._mergeable_ranks),
            eod=encoding.encode_single_token(END_OF_TEXT),
            vocab_size=encoding.n_vocab,
        )
        self.encoding = encoding
        self._fast: Any = None  # made when first needed, by every process for itself

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fast": None}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encoding.encode(text, disallowed_special=())
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        if self._fast is None:
            self._fast = fast_encoder(self.encoding._mergeable_ranks)
        ids: np.ndarray = self._fast.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.encoding.decode([int(token) for token in ids if token != self.encoding.eot_token])
        return text


def load_tokenizer(source: str | Path) -> Tokenizer:
    """A folder with the files of a Hugging Face or GPT-2 tokenizer, a sentencepiece .model file, or the word gpt2."""
    path = Path(source)
    if path.is_dir():
        return _load_folder(path)
    if path.is_file() and path.suffix == ".model":
        return _load_sentencepiece(path)
    if str(source) == GPT2:
        return _load_gpt2()
    raise UserError(
        f"tokenizer: got {str(source)!r}, allowed a folder with Hugging Face tokenizer files, "
        f"a sentencepiece .model file or {GPT2!r}; check the path"
    )


def _load_sentencepiece(path: Path) -> Tokenizer:
    import sentencepiece

    raw = path.read_bytes()
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=raw)
    except RuntimeError as error:
        raise UserError(f"tokenizer: {path} is not a sentencepiece model; train or copy it again") from error
    if processor.eos_id() < 0:
        raise UserError(f"tokenizer: {path} has no end-of-document (eos) piece; train it with an eos_id")
    return _SentencePiece(processor, name=str(path), sha256=hashlib.sha256(raw).hexdigest())


def _line_chunks(text: str) -> list[str]:
    """Cuts behind newlines, at least every _CHUNK_CHARS where there is one; no piece spans a newline."""
    chunks: list[str] = []
    start = 0
    while len(text) - start > _CHUNK_CHARS:
        newline = text.find("\n", start + _CHUNK_CHARS)
        if newline < 0:
            break
        chunks.append(text[start : newline + 1])
        start = newline + 1
    return [*chunks, text[start:]]


def _load_folder(path: Path) -> Tokenizer:
    if pair := find_gpt2_files(path):
        return _GPT2(load_gpt2_files(*pair), name=str(path))
    if not (path / "tokenizer_config.json").is_file():
        raise UserError(f"tokenizer: {path} has no tokenizer_config.json; give the folder of a complete tokenizer")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer: {path} has no end-of-document token; set eos_token in its tokenizer_config.json")
    if len(tokenizer) < 2:
        raise UserError(f"tokenizer: {path} loads as an empty vocabulary; add its tokenizer.json")
    defining = re.compile(r"(tokenizer|vocab|merges|added|special).*\.(json|model|txt)")
    files = sorted(file for file in path.iterdir() if defining.fullmatch(file.name))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return _HuggingFace(tokenizer, name=str(path), sha256=digest)


def _load_gpt2() -> Tokenizer:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(GPT2)
    except OSError as error:  # requests' network errors are OSErrors
        raise UserError(
            "tokenizer: gpt2 is not in tiktoken's cache and cannot be downloaded; give a folder with GPT-2's own files "
            "(--tokenizer FOLDER or data.tokenizer=FOLDER, with encoder.json and vocab.bpe or vocab.json and "
            "merges.txt), or set TIKTOKEN_CACHE_DIR to a cache that holds them"
        ) from error
    # A copy under a name of its own: tiktoken pickles what it knows by name as that name, to be loaded again.
    return _GPT2(gpt2_encoding(encoding._mergeable_ranks, encoding.eot_token), name=GPT2)

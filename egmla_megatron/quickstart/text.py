"""Real text from the machine itself: the Python standard library's sources, tokenized for training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from egmla_megatron.data.corpus import collect_stdlib, split_documents
from egmla_megatron.data.indexed import write_texts
from egmla_megatron.data.tokenizer import load_tokenizer
from egmla_megatron.data.train_tokenizer import train_sentencepiece

__all__ = ["VOCAB_SIZE", "QuickstartData", "prepare_text"]

VOCAB_SIZE = 8192  # pieces, as configs/model/quickstart.yaml


@dataclass(frozen=True)
class QuickstartData:
    """Where the prepared data lies."""

    tokenizer: Path
    train: Path  # prefix
    valid: Path  # prefix


def prepare_text(folder: Path) -> QuickstartData:
    """Collect, split by document, train a tokenizer, tokenize; nothing is done twice in one folder."""
    data = QuickstartData(folder / "tokenizer.model", folder / "train", folder / "valid")
    manifests = [prefix.with_suffix(".json") for prefix in (data.train, data.valid)]
    if all(path.is_file() for path in (data.tokenizer, *manifests)):
        return data
    documents = collect_stdlib()
    train, valid = split_documents(documents)
    size = sum(document.bytes for document in documents) / 1e6
    print(f"text: {len(documents)} files of Python's standard library, {size:.1f} MB, {len(valid)} for validation")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"tokenizer: sentencepiece, {VOCAB_SIZE} pieces")
    train_sentencepiece((document.text for document in train), data.tokenizer, vocab_size=VOCAB_SIZE)
    tokenizer = load_tokenizer(data.tokenizer)
    for prefix, part in ((data.train, train), (data.valid, valid)):
        texts = (document.text for document in part)
        write_texts(prefix, texts, tokenizer, source="Python standard library", total=len(part))
    return data

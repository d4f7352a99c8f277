"""Trains the sentencepiece tokenizer of the quickstart.

The settings are those under which convert/hf_tokenizer.py finds an exact tokenizer.json: unigram, byte fallback,
identity normalization, no dummy prefix, white space kept, scores on a binary grid.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterable
from pathlib import Path

from egmla_megatron.data.sentencepiece_model import parse_model
from egmla_megatron.errors import UserError

__all__ = ["SCORE_GRID", "train_sentencepiece"]

SCORE_GRID = 16  # piece scores are multiples of 1 / SCORE_GRID nats: sums below 2^20 nats are exact in fp32
_RESERVED = 3 + 256  # unk, bos, eos and the byte pieces
_SPELLING = "<>/" + "0123456789ABCDEF" + "xunks"  # characters of special and byte pieces: must be pieces themselves


def train_sentencepiece(
    documents: Iterable[str],
    out: str | Path,
    *,
    vocab_size: int = 8192,
    max_lines: int = 40_000,
    seed: int = 1234,
    num_threads: int = 2,
) -> Path:
    """Trains on at most max_lines distinct lines (drawn at random) and writes `out`, a .model file.

    Ids: 0 unknown, 1 begin of text, 2 end of text, then 256 byte pieces, then pieces by falling score. Newlines are
    never part of a piece.
    """
    import sentencepiece

    out = Path(out)
    if out.suffix != ".model":
        raise UserError(f"tokenizer: got {out}, allowed a file name that ends in .model")
    lines = sorted({line for document in documents for line in document.split("\n") if line.strip()})
    lines = random.Random(seed).sample(lines, min(max_lines, len(lines)))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            required_chars=_SPELLING,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=num_threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"tokenizer: {len(lines)} lines of text cannot fill a vocabulary of {vocab_size} "
            f"({_RESERVED} ids are reserved); give more text or a smaller vocabulary"
        ) from error
    proto = parse_model(model.getvalue(), str(out))
    for piece in proto.pieces:
        piece.score = round(piece.score * SCORE_GRID) / SCORE_GRID
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.write_bytes(proto.SerializeToString())
    partial.rename(out)
    return out

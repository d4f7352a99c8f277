"""Tokenizer files of an exported model.

A folder of Hugging Face tokenizer files is copied. GPT-2's own two files, which transformers does not read, become a
tokenizer.json. A sentencepiece unigram model becomes a tokenizer.json that encodes
exactly as sentencepiece does; a model for which this cannot hold is refused. Why the conversion is exact:

- both sides run the same Viterbi search, ties included. Scores on a coarse binary grid (data/tokenizer.py) make
  sentencepiece's fp32 sums and the fp64 sums of `tokenizers` equal;
- sentencepiece never finds control and byte pieces in text. `tokenizers` would, so their scores are so low here
  that spelling them out always wins (every character of them must be a piece of its own), and special tokens are
  not parsed in text (`split_special_tokens`).

Decoding is equal for every sequence whose byte pieces form valid UTF-8; for a broken run of bytes, `tokenizers` puts
a replacement character for each byte of the run, sentencepiece only for the broken ones.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egmla_megatron.data.gpt2 import END_OF_TEXT, find_gpt2_files, load_gpt2_files
from egmla_megatron.data.sentencepiece_model import parse_model
from egmla_megatron.errors import UserError

__all__ = ["TokenizerInfo", "write_tokenizer_files"]

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # sentencepiece piece types
_UNIGRAM = 1  # sentencepiece model type
_NEVER = -1e6  # score of a piece that must not be found in text
_SELF_CHECKS = 200  # random strings encoded by both sides


@dataclass(frozen=True)
class TokenizerInfo:
    """Ids that go into config.json and generation_config.json, and the number of ids."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None


def write_tokenizer_files(source: str | Path, out_dir: Path, *, max_length: int) -> TokenizerInfo:
    """Writes the tokenizer `source` (folder or sentencepiece .model) into out_dir.

    max_length: tokens, `model_max_length` of a converted tokenizer.
    """
    source = Path(source)
    if source.is_dir():
        bare = None if (source / "tokenizer_config.json").exists() else find_gpt2_files(source)
        return _convert_gpt2(*bare, out_dir, max_length) if bare else _copy_folder(source, out_dir)
    if source.suffix == ".model" and source.is_file():
        return _convert_sentencepiece(source, out_dir, max_length)
    raise UserError(
        f"tokenizer: got {source}, allowed a folder with Hugging Face tokenizer files or a sentencepiece .model file"
    )


def _copy_folder(source: Path, out_dir: Path) -> TokenizerInfo:
    from transformers import AutoTokenizer

    names = [name for name in _FILES if (source / name).is_file()]
    if "tokenizer_config.json" not in names:
        raise UserError(f"tokenizer: {source} has no tokenizer_config.json; give the folder of a complete tokenizer")
    for name in names:
        shutil.copyfile(source / name, out_dir / name)
    tokenizer = AutoTokenizer.from_pretrained(str(out_dir))
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer: {source} has no end-of-text token; set eos_token in its tokenizer_config.json")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return TokenizerInfo(len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, pad)


def _convert_gpt2(vocabulary: Path, merges: Path, out_dir: Path, max_length: int) -> TokenizerInfo:
    """GPT-2's files as a byte-level tokenizer.json, held against tiktoken's reading of the same files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    encoding = load_gpt2_files(vocabulary, merges)
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines[1:]) if right]  # [0]: version
    tokenizer = Tokenizer(models.BPE(vocab=json.loads(vocabulary.read_text(encoding="utf-8")), merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    tokenizer.encode_special_tokens = True
    rng = random.Random(0)
    for text in (_random_text(encoding, rng) for _ in range(_SELF_CHECKS)):
        if encoding.encode(text, disallowed_special=()) != tokenizer.encode(text, add_special_tokens=False).ids:
            raise UserError(f"tokenizer: {vocabulary.parent} and its tokenizer.json disagree on {text!r}")
    tokenizer.save(str(out_dir / "tokenizer.json"))
    _write_config(out_dir, {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}, max_length)
    end = encoding.eot_token
    return TokenizerInfo(encoding.n_vocab, end, end, end)


def _random_text(encoding: Any, rng: random.Random) -> str:
    ids = [rng.randrange(encoding.n_vocab - 1) for _ in range(rng.randrange(40))]
    return encoding.decode(ids).replace("\ufffd", rng.choice(" \n\u00df\u4e2d'\U0001f600"))


def _write_config(out_dir: Path, tokens: dict[str, str], max_length: int) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "split_special_tokens": True,  # text that looks like a special token is text, as it was in training
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _convert_sentencepiece(source: Path, out_dir: Path, max_length: int) -> TokenizerInfo:
    proto = parse_model(source.read_bytes(), str(source))
    _require_exact(source, proto)
    tokenizer = _build_tokenizer(proto)
    _self_check(source, proto, tokenizer)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    shutil.copyfile(source, out_dir / "tokenizer.model")
    spec = proto.trainer_spec
    names = {"unk_token": spec.unk_piece, "bos_token": spec.bos_piece}
    _write_config(out_dir, {**names, "eos_token": spec.eos_piece, "pad_token": spec.eos_piece}, max_length)
    return TokenizerInfo(len(proto.pieces), spec.bos_id, spec.eos_id, spec.eos_id)


def _require_exact(source: Path, proto: Any) -> None:
    """Refuses models whose behaviour tokenizer.json cannot reproduce to the last id."""
    spec, norm = proto.trainer_spec, proto.normalizer_spec
    known = {_NORMAL, _UNKNOWN, _CONTROL, _BYTE}
    singles = {piece.piece for piece in proto.pieces if piece.type == _NORMAL and len(piece.piece) == 1}
    spelled = {char for piece in proto.pieces if piece.type != _NORMAL for char in piece.piece}
    faults = {
        "model_type must be unigram": spec.model_type != _UNIGRAM,
        "byte_fallback must be on": not spec.byte_fallback,
        "bos and eos must exist": spec.bos_id < 0 or spec.eos_id < 0,
        "normalization must be identity": norm.name != "identity" or bool(norm.precompiled_charsmap),
        "add_dummy_prefix must be off": norm.add_dummy_prefix,
        "remove_extra_whitespaces must be off": norm.remove_extra_whitespaces,
        "escape_whitespaces must be on": not norm.escape_whitespaces,
        "user-defined pieces are not allowed": any(piece.type not in known for piece in proto.pieces),
        "the characters of special and byte pieces must be pieces": not spelled <= singles,
    }
    found = [text for text, fault in faults.items() if fault]
    if found:
        raise UserError(
            f"tokenizer: {source} has no exact tokenizer.json: {'; '.join(found)}; "
            "train it with egmla_megatron.data.tokenizer or give a folder with Hugging Face tokenizer files"
        )


def _build_tokenizer(proto: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    vocab = [(piece.piece, piece.score if piece.type == _NORMAL else _NEVER) for piece in proto.pieces]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=proto.trainer_spec.unk_id, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [piece.piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _self_check(source: Path, proto: Any, tokenizer: Any) -> None:
    """Both sides encode random text made of the model's own pieces, white space and foreign characters."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    rng = random.Random(0)
    pieces = [piece.piece.replace("\u2581", " ") for piece in proto.pieces] + [" ", "\n", "\t", "\u00df", "\u4e2d"] * 50
    tokenizer.encode_special_tokens = True
    for _ in range(_SELF_CHECKS):
        text = "".join(rng.choices(pieces, k=rng.randrange(40)))
        if processor.encode(text) != tokenizer.encode(text, add_special_tokens=False).ids:
            raise UserError(f"tokenizer: {source} and its tokenizer.json disagree on {text!r}; give a tokenizer folder")

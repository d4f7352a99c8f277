"""GPT-2's kind of tokenizer from its files: the same ids as the tokenizers library, errors with names."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import pytest

from egmla_megatron.data.gpt2 import END_OF_TEXT
from egmla_megatron.data.tokenizer import load_tokenizer
from egmla_megatron.errors import UserError

TEXTS = ["the cat the hat", " then\n\n  they're 123 é日本🙂 ", "", "\t\x00", f"a {END_OF_TEXT} b", "the" * 50]
MERGES = ["t h", "th e", "Ġ the", "a t", "c at", "r e", "' re"]


def write_files(folder: Path, names: tuple[str, str] = ("encoder.json", "vocab.bpe"), *, end: bool = True) -> Path:
    """A byte-level BPE of 256 bytes and a few merges, in the form of GPT-2's files."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    pieces = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
    folder.mkdir(exist_ok=True)
    ids = {piece: number for number, piece in enumerate([*pieces, *([END_OF_TEXT] if end else [])])}
    (folder / names[0]).write_text(json.dumps(ids), encoding="utf-8")
    (folder / names[1]).write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n", encoding="utf-8")
    return folder


def test_ids_equal_those_of_the_tokenizers_library(tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    folder = write_files(tmp_path / "gpt2")
    ours = load_tokenizer(folder)
    theirs = ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    copy = pickle.loads(pickle.dumps(ours.encode_array))  # as worker processes get it
    for text in TEXTS:
        expected = theirs.encode(text).ids
        assert ours.encode(text) == expected == copy(text).tolist(), text
        assert ours.decode(expected) == text
    assert len(ours.encode("the")) == 1 and len(ours.encode(" the")) == 1
    assert (ours.kind, ours.eod, ours.vocab_size) == ("gpt2", 263, 264)


def test_arrays_hold_the_same_ids_for_any_text(tmp_path: Path) -> None:
    """Two libraries, tiktoken and gigatoken, over random Unicode: every class of characters cuts text differently."""
    ours = load_tokenizer(write_files(tmp_path / "gpt2"))
    draw = random.Random(0)
    odd = [
        *TEXTS,
        "\u3000",
        "\u00a0",
        "\u2028",
        "\r\n",
        "'S",
        "\u2019re",
        "\u0660",
        "\u00bd",
        "\u01c5",
        "e\u0301",
        "\ufffd",
        "\x85",
    ]
    odd += [chr(code) for code in (draw.randrange(0x110000) for _ in range(3000)) if not 0xD800 <= code < 0xE000]
    for _ in range(3000):
        text = "".join(draw.choices(odd, k=draw.randrange(1, 12)))
        assert ours.encode_array(text).tolist() == ours.encode(text), repr(text)


def test_both_pairs_of_names_are_the_same_tokenizer(tmp_path: Path) -> None:
    one = load_tokenizer(write_files(tmp_path / "a"))
    folder = write_files(tmp_path / "b", ("vocab.json", "merges.txt"))
    assert load_tokenizer(folder).sha256 == one.sha256
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2TokenizerFast", "eos_token": {"content": END_OF_TEXT}})
    )
    assert (load_tokenizer(folder).kind, load_tokenizer(folder).sha256) == ("gpt2", one.sha256)


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "RobertaTokenizer"},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"300": {"content": "<extra>"}}},
    ],
)
def test_other_models_with_the_same_file_names_are_not_taken_for_gpt2(
    tmp_path: Path, config: dict[str, object]
) -> None:
    from egmla_megatron.data.gpt2 import find_gpt2_files

    folder = write_files(tmp_path / "x", ("vocab.json", "merges.txt"))
    assert find_gpt2_files(folder) is not None
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert find_gpt2_files(folder) is None


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no end-of-document token <\|endoftext\|>"):
        load_tokenizer(write_files(tmp_path / "no end", end=False))
    folder = write_files(tmp_path / "other")
    (folder / "vocab.bpe").write_text("#version: 0.2\nt h\nh e\n", encoding="utf-8")
    with pytest.raises(UserError, match="do not belong together or are damaged"):
        load_tokenizer(folder)
    (folder / "encoder.json").write_text("{")
    with pytest.raises(UserError, match="do not belong together or are damaged"):
        load_tokenizer(folder)
    pair = write_files(tmp_path / "hf", ("vocab.json", "merges.txt"))
    (pair / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="got a list, expected a JSON object"):
        load_tokenizer(pair)


def test_an_empty_folder_and_an_empty_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_an_export_carries_the_same_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from egmla_megatron.convert.hf_tokenizer import TokenizerInfo, write_tokenizer_files

    folder = write_files(tmp_path / "gpt2")
    (tmp_path / "out").mkdir()
    assert write_tokenizer_files(folder, tmp_path / "out", max_length=64) == TokenizerInfo(264, 263, 263, 263)
    ours, exported = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert (exported.eos_token_id, exported.pad_token_id, exported.model_max_length) == (263, 263, 64)
    for text in TEXTS:
        ids = exported.encode(text, add_special_tokens=False)
        assert ids == ours.encode(text), text
        assert exported.decode(ids, skip_special_tokens=True) == text

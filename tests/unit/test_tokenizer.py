"""The quickstart's tokenizer: exact tokenizer.json, loads offline, clear errors."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import pytest

from egmla_megatron.convert.hf_tokenizer import write_tokenizer_files
from egmla_megatron.data.sentencepiece_model import parse_model
from egmla_megatron.data.tokenizer import TokenIds, load_tokenizer
from egmla_megatron.data.train_tokenizer import SCORE_GRID, train_sentencepiece
from egmla_megatron.errors import UserError

VOCAB = 700
TEXT = Path(json.__file__).with_name("decoder.py").read_text(encoding="utf-8")
ODD = [
    " ",
    "   ",
    "\n",
    "\n    ",
    "\t",
    "\x00",
    "\x0c",
    "\u00e9",
    "\u65e5\u672c",
    "\U0001f642",
    "\u2581",
    "\ufffd",
    "---",
]
SPECIAL = ["<s>", "</s>", "<unk>", "<0x41>", "<0x0A>"]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece([TEXT], tmp_path_factory.mktemp("tokenizer") / "tiny.model", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def exported(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a folder")  # the name has a space
    info = write_tokenizer_files(model_file, folder, max_length=128)
    assert (info.vocab_size, info.bos_token_id, info.eos_token_id, info.pad_token_id) == (VOCAB, 1, 2, 2)
    return folder


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    words = [*TEXT.split(), *ODD * 20, *SPECIAL * 5]
    return ["".join(rng.choices(words, k=rng.randrange(30))) for _ in range(count)] + [TEXT, " " + TEXT, "", TEXT * 12]


def test_exported_tokenizer_encodes_exactly_as_sentencepiece(model_file: Path, exported: Path) -> None:
    import sentencepiece
    from transformers import AutoTokenizer

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    tokenizer = AutoTokenizer.from_pretrained(str(exported), local_files_only=True)
    ours, folder = load_tokenizer(model_file), load_tokenizer(exported)
    copies = [pickle.loads(pickle.dumps(one.encode_array)) for one in (ours, folder)]  # as worker processes get it
    for text in random_texts(600):
        expected = processor.encode(text)
        assert tokenizer(text)["input_ids"] == expected, text
        assert ours.encode(text) == expected and folder.encode(text) == expected, text
        assert all(copy(text).tolist() == expected for copy in copies), text
        assert tokenizer.decode(expected) == ours.decode(expected) == text.replace("\u2581", " ")
    assert tokenizer.decode([2, *processor.encode("a b"), 2], skip_special_tokens=True) == "a b"
    assert len(tokenizer) == VOCAB and tokenizer.model_max_length == 128


def test_pieces_never_hold_newlines_and_scores_lie_on_the_grid(model_file: Path) -> None:
    pieces = parse_model(model_file.read_bytes(), "tiny").pieces
    assert not [piece.piece for piece in pieces if "\n" in piece.piece]
    assert all((piece.score * SCORE_GRID).is_integer() for piece in pieces)


def test_training_is_repeatable(model_file: Path, tmp_path: Path) -> None:
    again = train_sentencepiece([TEXT], tmp_path / "tiny.model", vocab_size=VOCAB)
    assert load_tokenizer(again).sha256 == load_tokenizer(model_file).sha256
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.model"]


def test_end_of_document_id_and_identity(model_file: Path) -> None:
    tokenizer = load_tokenizer(model_file)
    assert (tokenizer.kind, tokenizer.eod, tokenizer.eos, tokenizer.vocab_size) == ("sentencepiece", 2, 2, VOCAB)
    assert str(model_file.parent) not in json.dumps(tokenizer.unique_identifiers)


def test_megatron_dataset_configuration_takes_it() -> None:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        blend=(["none"], None),
        split="1,0,0",
        tokenizer=TokenIds(eod=2, vocab_size=VOCAB),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    assert config.token_dtype_code == 8
    assert config.tokenizer.unique_identifiers["eod"] == 2


def test_unknown_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"got 'nowhere', allowed a folder"):
        load_tokenizer("nowhere")
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(UserError, match="is not a sentencepiece model"):
        load_tokenizer(tmp_path / "bad.model")
    with pytest.raises(UserError, match=r"has no tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_text_that_looks_special_is_text_in_every_folder(exported: Path, tmp_path: Path) -> None:
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((exported / "tokenizer_config.json").read_text())
    del config["split_special_tokens"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("a</s>") == load_tokenizer(exported).encode("a</s>")


def test_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    ranks = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding(
        "tiny", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.encode("<|endoftext|>") == list(b"<|endoftext|>")
    assert tokenizer.decode([*b"a b", 256]) == "a b"

    def offline(name: str) -> None:
        raise ConnectionError(name)

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="set TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2")


def test_missing_end_token_is_an_error(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((exported / "tokenizer.json").read_bytes())
    config = json.loads((exported / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in ("eos_token", "pad_token")})
    )
    with pytest.raises(UserError, match="set eos_token"):
        load_tokenizer(tmp_path)


def test_models_without_an_exact_twin_are_refused(model_file: Path, tmp_path: Path) -> None:
    proto = parse_model(model_file.read_bytes(), "tiny")
    proto.normalizer_spec.add_dummy_prefix = True
    proto.trainer_spec.byte_fallback = False
    (tmp_path / "other.model").write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match="byte_fallback must be on; add_dummy_prefix must be off"):
        write_tokenizer_files(tmp_path / "other.model", tmp_path, max_length=8)


def test_too_little_text_for_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot fill a vocabulary of 8192"):
        train_sentencepiece(["one line"], tmp_path / "x.model")

"""What preprocessing says of licences, of missing validation data and of a tokenizer that is not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.data.tokenizer import load_tokenizer
from egmla_megatron.errors import UserError
from egmla_megatron.preprocess.sources import Source
from egmla_megatron.preprocess.summary import is_climbmix
from tests.preprocess import run, write_jsonl

ROWS = [[1, 2, 3, number] for number in range(40)]


def _source(name: str, cluster: str = "") -> Source:
    return Source(name, "jsonl", "tokens", "tokens", cluster, 1, ())


@pytest.mark.parametrize(
    ("name", "cluster", "expected"),
    [
        ("data/ClimbMix/part_0.jsonl", "cluster_id", True),
        ("hf:OptimalScale/climb-mix", "", True),
        ("downloads/mine.jsonl", "cluster_id", False),
        ("climbing/routes.jsonl", "cluster_id", False),
    ],
)
def test_the_licence_goes_by_the_name(name: str, cluster: str, expected: bool) -> None:
    assert is_climbmix([_source(name, cluster)]) is expected


@pytest.mark.parametrize(
    ("fraction", "line"),
    [
        (1e-9, r"none: --validation-fraction 1e-09 chose none of 40 documents; --validation-fraction 0\.5 \(with"),
        (0.0, r"none, as asked \(--validation-fraction 0\)"),
        (0.5, r"\d+ documents, \d+ tokens"),
    ],
)
def test_no_validation_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str], fraction: float, line: str) -> None:
    run(tmp_path / "out", write_jsonl(tmp_path / "x.jsonl", ROWS), validation_fraction=fraction)
    said = re.search(r"^validation +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert said and re.match(line, said[1]), said
    assert (tmp_path / "out_val.bin").exists() is (fraction == 0.5)


def test_a_tokenizer_that_cannot_be_downloaded_names_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(UserError) as caught:
        load_tokenizer("gpt2")
    for part in ("--tokenizer FOLDER", "data.tokenizer=FOLDER", "merges.txt", "TIKTOKEN_CACHE_DIR"):
        assert part in str(caught.value)

"""Distinct ids of predictions: measured in the training data where they can be read; it is said where they are from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from egmla_megatron.config.load import load_config
from egmla_megatron.config.ranges import check_ranges
from egmla_megatron.data.distinct import distinct_shares
from egmla_megatron.data.indexed import write_tokens
from egmla_megatron.errors import UserError
from egmla_megatron.report.distinct import with_measured_ids
from egmla_megatron.report.memory import unique_fraction
from egmla_megatron.report.plan import make_plan
from egmla_megatron.report.show_plan import format_plan


def write(prefix: Path, ids: int, documents: int = 40, length: int = 1000) -> str:
    """Uniformly drawn ids below `ids`."""
    draw = random.Random(1)
    texts = ([draw.randrange(1, ids) for _ in range(length)] for _ in range(documents))
    write_tokens(prefix, texts, vocab_size=8192, eod_id=0, tokenizer="none", tokenizer_sha256="", source="a test")
    return str(prefix)


def expected(ids: int, tokens: int) -> float:
    """Mean share of distinct ids among uniform ones."""
    return (ids - 1) * (1 - (1 - 1 / (ids - 1)) ** tokens) / tokens


def test_shares_of_uniform_ids_are_those_of_the_formula(tmp_path: Path) -> None:
    prefix = write(tmp_path / "few", 500)
    shares = distinct_shares([prefix], 128)
    assert len(shares) == 6  # 40,000 tokens are more than 2**15
    assert shares == pytest.approx([expected(500, 2**power) for power in range(10, 16)], rel=0.02)
    many = write(tmp_path / "many", 8000)
    both = distinct_shares(["3", prefix, "1", many], 128)
    assert shares[0] < both[0] < distinct_shares([many], 128)[0]


def test_without_data_that_can_be_read_there_are_none(tmp_path: Path) -> None:
    assert distinct_shares([write(tmp_path / "short", 50, documents=1)], 128) == ()
    assert distinct_shares([str(tmp_path / "gone")], 128) == ()
    (tmp_path / "cut.idx").write_bytes(b"MMIDIDX")
    (tmp_path / "cut.bin").write_bytes(b"")
    assert distinct_shares([str(tmp_path / "cut"), write(tmp_path / "whole", 50)], 128) == ()


def test_the_plan_says_where_its_share_is_from(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", 500)
    for data, fraction, origin in (
        (f"data.train=[{prefix}]", expected(500, 1024), "measured in data.train"),
        ("data.train=[]", 0.38, "as of English in GPT-2's vocabulary: data.train is empty"),
        ("data.train=[/gone]", 0.38, "as of English in GPT-2's vocabulary: data.train cannot be read here"),
        ("data.unique_fractions=[0.3,0.2]", 0.3, "given by data.unique_fractions"),
    ):
        plan = make_plan("quickstart", [data], 2)
        found = plan["distinct_ids_of_micro_batch"]
        assert found["tokens"] == 1024 and found["fraction"] == pytest.approx(fraction, rel=0.03)
        assert f"{100 * found['fraction']:.1f} %  {origin}" in format_plan(plan)
    few, english = (make_plan("quickstart", [f"data.train=[{data}]"], 2) for data in (prefix, ""))
    for name in ("memory_per_rank_bytes", "sent_per_step_and_rank"):  # all that depends on it
        assert few[name] != english[name]
    assert "distinct_ids_of_micro_batch" not in make_plan("pretrain_mla_base")


def test_the_run_itself_and_its_report_take_the_same(tmp_path: Path) -> None:
    cfg, origin = with_measured_ids(load_config("quickstart", [f"data.train=[{write(tmp_path / 'data', 500)}]"]))
    assert origin == "measured in data.train" and len(cfg.data.unique_fractions) == 6
    assert with_measured_ids(cfg) == (cfg, "given by data.unique_fractions")
    assert unique_fraction(1 << 12, cfg.data.unique_fractions) == cfg.data.unique_fractions[2]


@pytest.mark.parametrize("shares", ["[0.2,0.3]", "[1.2]", "[0.3,0]"])
def test_shares_that_cannot_be(shares: str) -> None:
    with pytest.raises(UserError, match=r"data\.unique_fractions: got .*none larger than the one before"):
        check_ranges(load_config("quickstart", [f"data.unique_fractions={shares}"]))

"""Table and figure from fixed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from egmla_megatron.bench.paper import PAPER, paper_pairs
from egmla_megatron.bench.plot import draw
from egmla_megatron.bench.table import markdown, saved, speedup
from tests.bench import fixed_result, fixed_row


def cells(table: str, name: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_papers_numbers_are_those_of_its_text() -> None:
    """2.04 and 2.18 times the throughput, 12.3% and 15.7% of the memory, 8.6% and 13.0% of a step in communication."""
    pairs = [PAPER[:2], PAPER[2:]]
    assert [round(ours.tokens_per_second / theirs.tokens_per_second, 2) for theirs, ours in pairs] == [2.04, 2.18]
    assert [round(1 - ours.peak_mb / theirs.peak_mb, 3) for theirs, ours in pairs] == [0.123, 0.157]
    assert [round(ours.exchange_ms / ours.step_ms, 3) for _, ours in pairs] == [0.086, 0.130]
    assert all(round(row.tokens_per_second * row.step_ms / 1e3 / row.nodes, -1) == 8190 for row in PAPER)


def test_the_table_stands_beside_the_papers() -> None:
    table = markdown(fixed_result())
    ours = cells(table, "dimension_wise_all_to_all")
    assert ours[3:11] == ["200.0 (198.0 to 205.0)", "81,920", "2.00", "-", "8,800", "12.0%", "10.00 (5.0%)", "5.00"]
    assert ours[11:14] == ["1,000.00", "990.00", "-"]
    paper = cells(table, "*paper: dimension-wise*")
    assert (paper[1], paper[5], paper[8], paper[9]) == ("2", "2.04", "12.3%", "16.25 (8.6%)")
    widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    assert "commit unknown" in table.lower() and "21.0% of them distinct" in table


def test_other_numbers_of_nodes_stand_beside_both_pairs() -> None:
    assert len(paper_pairs(2)) == len(paper_pairs(4)) == 1 and len(paper_pairs(8)) == 2


def test_memory_and_vanilla_may_be_missing() -> None:
    result = fixed_result(peak=False)
    assert cells(markdown(result), "vanilla")[7:9] == ["-", "-"]
    del result["rows"][0]
    assert cells(markdown(result), "dimension_wise_all_to_all")[5] == "-"


def test_speedup_compares_each_round_with_itself() -> None:
    vanilla, ours = fixed_row("vanilla", 1.0, None, 0.0), fixed_row("x", 1.0, None, 1.0)
    vanilla["step_ms_median_of_rounds"], ours["step_ms_median_of_rounds"] = [100.0, 200.0, 90.0], [50.0, 100.0, 90.0]
    assert speedup(ours, vanilla) == 2.0
    assert speedup(ours, None) is None and saved(ours, vanilla) is None


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_figure(tmp_path: Path, suffix: str, magic: bytes) -> None:
    for peak in (True, False):
        path = tmp_path / f"figure_{peak}.{suffix}"
        draw(fixed_result(peak), path)
        assert path.read_bytes().startswith(magic)

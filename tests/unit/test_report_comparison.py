"""Reports of several runs: what may be compared, and what is one row."""

from __future__ import annotations

from pathlib import Path

import pytest

from egmla_megatron.config.load import dump_yaml, load_config
from egmla_megatron.errors import UserError
from egmla_megatron.report.write import write_comparison
from tests.unit.test_report import _eval, _interrupted, _run, _start, _step


def test_losses_of_other_tokens_are_not_compared(tmp_path: Path) -> None:
    one = _run(tmp_path / "one", _interrupted(), name="one")
    two = _run(tmp_path / "two", _interrupted(), name="two")
    assert "Warning" not in write_comparison([one, two], tmp_path / "same").read_text()
    (two / "config.yaml").write_text(dump_yaml(load_config("quickstart", ["run.name=two", "model.vocab_size=4096"])))
    assert "count different tokens" in write_comparison([one, two], tmp_path / "other").read_text()
    assert (tmp_path / "other" / "comparison_time.png").exists()
    assert "count different tokens" in (tmp_path / "other" / "comparison.html").read_text()


def test_tokenizers_are_compared_by_checksum_where_both_are_known(tmp_path: Path) -> None:
    def compared(first: tuple[str, str | None], second: tuple[str, str | None]) -> str:
        runs = []
        for name, (path, checksum) in {"one": first, "two": second}.items():
            run = _run(tmp_path / name, [_start(0, None) | {"tokenizer_sha256": checksum}, _step(1, 5.0)], name=name)
            settings = [f"run.name={name}", f"data.tokenizer={path}"]
            (run / "config.yaml").write_text(dump_yaml(load_config("quickstart", settings)))
            runs.append(run)
        return write_comparison(runs, tmp_path / "out").read_text()

    assert "Warning" not in compared(("here/gpt2", "a" * 64), ("there/gpt2", "a" * 64))  # a copy is the same
    text = compared(("gpt2", "a" * 64), ("gpt2", "b" * 64))  # replaced between the runs
    assert "count different tokens (gpt2, sha256 aaaaaaaa, 8192 ids; gpt2, sha256 bbbbbbbb, 8192 ids)" in text
    assert "Warning" not in compared(("gpt2", "a" * 64), ("gpt2", None))
    assert "checksum not known" in compared(("here/gpt2", "a" * 64), ("there/gpt2", None))


def test_comparison(tmp_path: Path) -> None:
    runs = [_run(tmp_path / name, _interrupted(), name=name) for name in ("one", "two")]
    path = write_comparison(runs, tmp_path / "out")
    text = path.read_text()
    assert "| one | " in text
    assert "| two | " in text
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="two or more"):
        write_comparison(runs[:1], tmp_path)


def test_seeds_of_one_configuration_are_one_row(tmp_path: Path) -> None:
    runs = []
    for seed, loss in ((1, 5.0), (2, 5.5), (3, 6.3), (3, 7.0)):
        records = [_start(0, None), *(_step(step, loss, tokens_per_second=1000.0 * seed) for step in range(1, 9))]
        run = _run(tmp_path / f"run{len(runs)}", [*records, _eval(8, loss + 1)], name=f"s{len(runs)}")
        settings = [f"run.seed={seed}", f"run.name=s{len(runs)}", f"run.dir=runs/{seed}"]
        (run / "config.yaml").write_text(dump_yaml(load_config("quickstart", settings)))
        runs.append(run)
    other = load_config("quickstart", ["run.seed=4", "run.name=other", "optimizer.lr=1e-4"])
    (_run(tmp_path / "other", [_start(0, None), _step(8, 9.0)]) / "config.yaml").write_text(dump_yaml(other))
    shorter = _run(tmp_path / "shorter", [_start(0, None), _step(1, 9.0)])
    (shorter / "config.yaml").write_text(dump_yaml(load_config("quickstart", ["run.seed=5", "run.name=shorter"])))
    text = write_comparison([*runs, tmp_path / "other", shorter], tmp_path / "out").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows if len(row) == 9] == [
        ["run", "runs"],
        ["---", "---:"],
        ["s0, s1, s2", "3"],
        ["s3", "1"],  # the same seed again
        ["other", "1"],
        ["shorter", "1"],
    ]
    assert rows[2][-2:] == ["5.6000 (5.0000 to 6.3000)", "6.6000 (6.0000 to 7.3000)"] and rows[3][-2] == "7.0000"
    speeds = next(row for row in rows if row[0] == "s0, s1, s2" and len(row) == 8)
    assert speeds[2:6] == ["2,000 (1,000 to 3,000)", "1,000", "3,000", "15"]
    assert "s0, s1, s2: 1, 2, 3" in text

"""Several variants in one process: what one leaves behind, and what is known when a later one fails."""

from __future__ import annotations

import errno
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.bench import measure as measuring
from egmla_megatron.bench import train_session
from egmla_megatron.bench.batches import open_dataset
from egmla_megatron.bench.measure import measure
from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.bench.train_session import TrainBench, run_train_bench
from egmla_megatron.bench.train_variants import choose_variants
from egmla_megatron.errors import UserError
from egmla_megatron.model.build import EGMLAModel
from tests.tiny import tiny_run


def models() -> int:
    gc.collect()
    return sum(isinstance(each, EGMLAModel) for each in gc.get_objects())


@pytest.mark.parametrize("distributed", [True, False])
def test_a_measured_model_is_gone(world: Any, distributed: bool) -> None:
    cfg = tiny_run(optimizer={"distributed": distributed}, data={"train": []})
    before, schedule = models(), Schedule(1, 2, 0)
    for _ in range(2):
        measure(cfg, world, open_dataset(cfg, schedule.total), schedule)
        assert models() == before


def test_a_model_that_could_not_be_built_whole_is_gone(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no memory for an optimizer")

    cfg = tiny_run(data={"train": []})
    before, schedule = models(), Schedule(1, 2, 0)
    monkeypatch.setattr(measuring, "build_optimizer", fail)
    gc.disable()  # it is for `measure` to collect
    try:
        with pytest.raises(MemoryError, match="no memory for an optimizer"):
            measure(cfg, world, open_dataset(cfg, schedule.total), schedule)
        assert sum(isinstance(each, EGMLAModel) for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_full_disk_leaves_the_results_of_before(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = tiny_run(data={"train": []})
    (variant,) = choose_variants(["base"])
    written: list[str] = []
    write = Path.write_text

    def full(self: Path, text: str, **options: Any) -> int:
        if self.suffix not in (".json", ".tmp"):
            return write(self, text, **options)
        written.append(text)
        if len(written) == 1:
            return write(self, text, **options)
        write(self, text[:50], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train_session, "open_world", lambda *_: world)
    monkeypatch.setattr(Path, "write_text", full)
    out = tmp_path / "out.json"
    bench = TrainBench({variant: cfg}, {variant: world.layout}, {}, Schedule(1, 2, 0), 2, "", out)
    with pytest.raises(UserError, match="No space left"):
        run_train_bench(bench, ["bench"])
    assert out.read_text() == written[0] and list(tmp_path.iterdir()) == [out]


def test_what_was_measured_before_a_failure(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = tiny_run(data={"train": []})
    one, other, last = choose_variants(["base", "own:train.steps=7", "gate_add"])
    configs = {one: cfg, other: replace(cfg, train=replace(cfg.train, steps=7)), last: cfg}
    calls: list[int] = []

    def sometimes(cfg: Any, *rest: Any) -> Any:
        calls.append(cfg.train.steps)
        if calls.count(7) == 1 and cfg.train.steps == 7:
            raise MemoryError("no memory for it")
        return measure(cfg, *rest)

    monkeypatch.setattr(train_session, "measure", sometimes)
    monkeypatch.setattr(train_session, "open_world", lambda *_: world)
    bench = TrainBench(
        configs, dict.fromkeys(configs, world.layout), {}, Schedule(1, 2, 0), 2, "", tmp_path / "out.json"
    )
    with pytest.raises(MemoryError, match="no memory for it"):
        run_train_bench(bench, ["bench"])
    assert len(calls) == 2
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["variant"] for row in result["rows"]] == ["base"] and result["rows"][0]["n"] == 2
    assert result["unfinished"] == ["base", "own", "gate_add"]
    output = capsys.readouterr().out
    assert "| base | " in output and "Not measured in all 2 rounds: base, own, gate_add." in output

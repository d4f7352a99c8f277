"""What can be said of captured steps without a GPU: who may ask for them, and how their shapes come to rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from egmla_megatron.attention.gate_ids import GatePlan
from egmla_megatron.config import load as load_module
from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import dump_yaml, from_dict, load_config, to_dict
from egmla_megatron.data.batch import Batch
from egmla_megatron.errors import UserError
from egmla_megatron.train.events import EVENTS
from egmla_megatron.train.graph import EAGER_STEPS, GraphedPasses
from egmla_megatron.train.sinks import Console

OBSTACLES = [
    ("parallel.pipeline=2", "parallel.pipeline=1"),
    ("parallel.tensor=2", "parallel.tensor=1"),
    ("parallel.context=2", "parallel.context=1"),
    ("train.recompute=full", "train.recompute=none"),
    ("train.recompute=selective", "train.recompute=none"),
    ("model.hidden_dropout=0.1", "model.hidden_dropout=0.0"),
    ("model.attention_dropout=0.1", "model.attention_dropout=0.0"),
    ("run.deterministic=true", "run.deterministic=false"),
]


@pytest.mark.parametrize(("override", "fix"), OBSTACLES)
def test_steps_that_differ_are_refused_by_name(override: str, fix: str) -> None:
    name = override.partition("=")[0]
    cfg = load_config("pretrain_base", ["train.cuda_graph=true", override])
    with pytest.raises(UserError, match=f"train.cuda_graph captures whole steps.*{name}.*cuda_graph=false or {fix}"):
        check_config(cfg, 2)
    check_config(load_config("pretrain_base", ["train.cuda_graph=true", "parallel.gate_group=2"]), 2)


@pytest.mark.parametrize(("override", "fix"), OBSTACLES)
def test_auto_gives_way_to_what_rules_a_graph_out(override: str, fix: str) -> None:
    cfg = load_config("pretrain_base", [override], gpu=True)
    assert cfg.train.cuda_graph is False
    check_config(cfg, 2)
    assert load_config("pretrain_base", [override, fix], gpu=True).train.cuda_graph is True


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_auto_asks_the_driver_where_nobody_says(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(load_module, "gpu_count", lambda: gpus)
    assert load_config("pretrain_base").train.cuda_graph is (gpus > 0)
    assert load_config("pretrain_base", ["parallel.pipeline=2"]).train.cuda_graph is False
    assert load_config("pretrain_base", gpu=True).train.cuda_graph is True
    assert load_config("pretrain_base", gpu=False).train.cuda_graph is False


def test_the_driver_is_asked_only_where_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> int:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(load_module, "gpu_count", ask)
    for config, overrides in (
        ("quickstart", []),
        ("pretrain_base", ["train.cuda_graph=true"]),
        ("pretrain_base", ["train.cuda_graph=false"]),
        ("pretrain_base", ["parallel.tensor=2"]),
    ):
        load_config(config, overrides)
    with pytest.raises(AssertionError, match="was asked"):
        load_config("quickstart", ["train.cuda_graph=auto"])


@pytest.mark.parametrize("auto", ["auto", "Auto", "'auto'"])
def test_overrides_beat_the_file(tmp_path: Path, auto: str) -> None:
    path = tmp_path / "config.yaml"
    for written, override, chosen in (
        (auto, [], True),
        (auto, ["train.cuda_graph=false"], False),
        (auto, ["train.cuda_graph=true", "parallel.tensor=2"], True),  # refused by the check, by name
        ("false", [f"train.cuda_graph={auto}"], True),
        ("true", [f"train.cuda_graph={auto}", "parallel.tensor=2"], False),
        ("true", ["train.cuda_graph=false", f"train.cuda_graph={auto}"], True),
    ):
        path.write_text(f"model:\n  name: x\ntrain:\n  cuda_graph: {written}\n")
        assert load_config(path, override, gpu=True).train.cuda_graph is chosen, (written, override)


@pytest.mark.parametrize("gpu", [True, False])
def test_what_was_chosen_is_kept(tmp_path: Path, gpu: bool) -> None:
    """A run's configuration is read again on machines of another kind."""
    cfg = load_config("pretrain_base", gpu=gpu)
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(cfg))
    assert f"cuda_graph: {str(gpu).lower()}\n" in path.read_text()
    assert load_config(path, gpu=not gpu) == from_dict(to_dict(cfg)) == cfg


def test_pretraining_takes_a_graph_on_gpus_alone(root: Path) -> None:
    paths = sorted((root / "configs" / "run").glob("pretrain_*.yaml"))
    assert len(paths) == 5
    for path in paths:
        assert load_config(path, gpu=True).train.cuda_graph is True, path
        assert load_config(path, gpu=False).train.cuda_graph is False, path
        check_config(load_config(path, gpu=True), 8)
    assert load_config("quickstart", gpu=True).train.cuda_graph is False


def test_the_console_says_how_passes_run(capsys: pytest.CaptureFixture[str]) -> None:
    layout = dict.fromkeys(("tp", "pp", "vp", "cp", "dp", "gate_group"), 1)
    start = dict.fromkeys(EVENTS["start"], 0) | {"kernels": "triton", "layout": layout}
    for graph in (True, False):
        Console().write("start", start | {"cuda_graph": graph})
        said = capsys.readouterr().out
        assert ("kernels triton, passes as one CUDA graph, 0.0M active" in said) is graph
        assert ("kernels triton, 0.0M active" in said) is not graph


def batch(ids: list[int]) -> Batch:
    tokens = torch.tensor([ids])
    rows = GatePlan(((0, 0),), 0, "all_to_all", True, 500).plan({(0, 0): tokens})
    return Batch(tokens, tokens, torch.ones(1, len(ids)), tokens, rows)


def test_rows_are_padded_to_the_most_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps run as they are; the captured one, and all after it, have the largest size so far."""
    seen: list[tuple[int, ...]] = []

    def schedule(batches: Iterator[Batch]) -> list[dict[str, Tensor]]:
        sizes = [each.gate_ids.sizes for each in batches if each.gate_ids is not None]
        seen.extend(sizes)
        return [{"loss": torch.zeros(())} for _ in sizes]

    few, many = batch([7] * 64), batch(list(range(32)) * 2)
    passes = GraphedPasses(schedule, 2)

    def capture(step: list[Batch]) -> None:  # stands for CUDA's, which only records
        schedule(iter(step))
        passes.static = step
        passes.graph = Graph()

    class Graph:
        def replay(self) -> None:
            """Nothing was recorded."""

    monkeypatch.setattr(passes, "_capture", capture)
    for step in range(EAGER_STEPS):
        assert len(passes(iter([few, many if step == 1 else few]))) == 2
    assert few.gate_ids is not None and many.gate_ids is not None
    assert set(seen) == {few.gate_ids.sizes, many.gate_ids.sizes}
    seen.clear()
    passes(iter([few, few]))
    assert seen == [many.gate_ids.sizes] * 2  # captured once, at the size that was seen before
    passes(iter([few, many]))
    assert len(seen) == 2  # replayed
    most = batch(list(range(64)))
    assert most.gate_ids is not None
    passes(iter([few, most]))
    assert seen[2:] == [most.gate_ids.sizes] * 2  # captured anew


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPU")
def test_a_torch_without_cuda_is_named() -> None:
    from egmla_megatron.parallel.world import use_capturable_stream

    cfg = load_config("pretrain_base", ["train.cuda_graph=true"])
    with pytest.raises(UserError, match=r"torch sees no CUDA device.*train\.cuda_graph=false"):
        use_capturable_stream(cfg, torch.device("cpu"))
    use_capturable_stream(load_config("pretrain_base", ["train.cuda_graph=false"]), torch.device("cpu"))

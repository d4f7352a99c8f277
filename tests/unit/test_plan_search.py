"""The search for layouts: what the command line pins, and what is said where nothing is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.config.load import load_config
from egmla_megatron.errors import UserError
from egmla_megatron.report.cards import find_card, find_cluster
from egmla_megatron.report.plan import Hardware, make_search
from egmla_megatron.report.search import SEARCHED, pinned_settings
from egmla_megatron.report.show_plan import format_search


def _hardware(gpus: int = 8, gib: float = 80.0) -> Hardware:
    card = find_card("h100", gib, 900.0)
    return Hardware(card, find_cluster(card, gpus, None, None, None), None)


def _search(*overrides: str, gpus: int = 8, gib: float = 80.0) -> dict[str, Any]:
    return make_search("pretrain_1b2", overrides, gpus, _hardware(gpus, gib))


@pytest.mark.parametrize(
    ("pin", "shown"),
    [
        ("train.cuda_graph=false", "false"),
        ("train.cuda_graph=TRUE", "true"),
        ("parallel.tensor=2", 2),
        ("parallel.sequence=false", "false"),
        ("parallel.sequence=true", "true"),
        ("parallel.pipeline=4", 4),
        ("train.micro_batch_size=12", 12),  # none of those that are tried else
        ("train.recompute=full", "full"),
        ("parallel.gate_group=2", 2),
    ],
)
def test_only_layouts_with_the_value_that_was_given(pin: str, shown: object) -> None:
    name = pin.partition("=")[0]
    found = _search(pin)
    assert found["layouts"] and {layout[name] for layout in found["layouts"]} == {shown}
    assert found["pinned"] == {name: str(shown)}
    assert f"pinned by the command line: {name}={shown}\n" in format_search(found)
    others = {each[key] for each in found["layouts"] for key in SEARCHED if key != name}
    assert len(others) > 5  # the rest is searched


def test_every_setting_of_a_layout_can_be_pinned() -> None:
    free = _search()
    assert free["pinned"] == {} and "pinned" not in format_search(free)
    assert [key for key in free["layouts"][0] if "." in key] == list(SEARCHED)
    best = [f"{name}={free['layouts'][5][name]}" for name in SEARCHED]
    (alone,) = _search(*best)["layouts"]
    assert alone == free["layouts"][5]


def test_auto_is_a_graph_wherever_there_can_be_one() -> None:
    found = _search("train.cuda_graph=auto")
    assert found["pinned"] == {"train.cuda_graph": "auto"}
    for each in found["layouts"]:
        possible = each["parallel.tensor"] * each["parallel.pipeline"] == 1 and each["train.recompute"] == "none"
        assert each["train.cuda_graph"] == str(possible).lower()


def test_other_settings_and_those_of_the_file_pin_nothing() -> None:
    cfg = load_config("pretrain_1b2", ["train.seq_length=512"], gpu=True)
    assert pinned_settings(cfg, ["train.seq_length=512"]) == {}
    assert {each["train.micro_batch_size"] for each in _search()["layouts"]} == {16, 12, 8, 6, 4, 3, 2, 1}


def test_the_pin_that_keeps_everything_away_is_named() -> None:
    text = format_search(_search("train.micro_batch_size=192", "train.recompute=none", gpus=2))
    assert "nothing fits with what the command line pins (the least that a layout needs is " in text
    lines = dict(line.strip().removeprefix("without ").split(": ") for line in text.splitlines()[2:])
    assert all(lines[name].endswith("layouts fit") for name in ("train.micro_batch_size=192", "train.recompute=none"))
    text = format_search(_search("train.cuda_graph=false", gpus=1, gib=4.0))
    assert "without train.cuda_graph=false: nothing fits either\n  leave several of them out, take more GPUs" in text
    assert "nothing fits (the least that a layout needs is" in format_search(_search(gpus=1, gib=4.0))


@pytest.mark.parametrize(("gib", "code"), [("4", 1), ("80", 0)])
def test_the_exit_code_says_whether_anything_fits_and_the_text_what_is_missing(gib: str, code: int) -> None:
    tool = Path(__file__).resolve().parents[2] / "tools" / "plan.py"
    words = ["pretrain_1b2", "--gpus", "1", "--gpu", "mine", "--gpu-tflops", "900", "--gpu-memory-gib", gib, "--search"]
    done = subprocess.run([sys.executable, str(tool), *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("nothing fits" in done.stdout) is (code == 1)
    if code:
        found = _search(gpus=1, gib=4.0)["nearest"]
        assert (
            f"{found['memory_gib']:.2f} GiB of a GPU, {found['short_gib']:.2f} GiB more than is usable" in done.stdout
        )
        assert found["memory_gib"] - found["short_gib"] == pytest.approx(0.94 * 4.0, abs=0.02)
        assert "the nearest: train.recompute=" in done.stdout


def test_pins_that_exclude_each_other() -> None:
    with pytest.raises(UserError) as caught:
        _search("parallel.tensor=2", "train.cuda_graph=true")
    message = str(caught.value)
    assert "got parallel.tensor=2, train.cuda_graph=true, pinned" in message and "not supported with" in message
    assert "without parallel.tensor 32 layouts fit; without train.cuda_graph " in message
    with pytest.raises(UserError, match=r"got parallel.tensor=3, pinned .*8 ranks for 3 x 1 x 1"):
        _search("parallel.tensor=3")
    with pytest.raises(UserError, match=r"parallel\.gate_group"):
        make_search("pretrain_mla_base", ["parallel.gate_group=2"], 8, _hardware())


def test_gpus_that_cannot_share_the_batch() -> None:
    with pytest.raises(UserError) as caught:
        _search(gpus=7)
    message = str(caught.value)
    assert message.startswith("--gpus: ") and "got 7 GPUs for 384 sequences" in message
    assert "micro" not in message and "give --gpus 8, or train.global_batch_size=385" in message
    assert _search("train.global_batch_size=385", gpus=7)["layouts"] and _search(gpus=6)["layouts"]
    for count in (0, -8):
        with pytest.raises(UserError, match="--gpus: got"):
            make_search("pretrain_1b2", [], count, _hardware())


def test_pins_on_the_command_line(root: Path) -> None:
    command = [sys.executable, "tools/plan.py", "pretrain_base", "--gpus", "8", "--gpu", "h100", "--search"]
    done = subprocess.run([*command, "train.cuda_graph=false"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pinned by the command line: train.cuda_graph=false" in done.stdout
    assert "cuda_graph=true" not in done.stdout

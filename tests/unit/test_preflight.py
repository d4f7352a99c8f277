"""Mistakes that `python -m egmla_megatron.train CONFIG --check` must find: one line on stderr, exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from egmla_megatron.checkpoint.manifest import Manifest, checkpoint_path, mark_complete
from egmla_megatron.config.load import architecture, load_config, to_dict
from egmla_megatron.train.main import main
from egmla_megatron.train.run_dir import write_config
from tests.tiny import write_run

CHECKED = 4  # steps of the checkpoint


class Trial:
    """A run folder with a checkpoint, and the outcome of one --check."""

    def __init__(self, folder: Path) -> None:
        self.config, self.run = write_run(folder, "run")
        self.data = folder / "data/train"
        cfg = load_config(self.config)
        write_config(cfg)
        manifest = Manifest(
            format=1,
            step=CHECKED,
            consumed_samples=16,
            consumed_tokens=256,
            architecture=architecture(cfg.model),
            config=to_dict(cfg),
            layout={"world_size": 1},
            data_fingerprint="abc",
            distributed_optimizer=False,
            implementation="torch",
            versions={},
            written_unix_s=1.0,
        )
        self.checkpoint = checkpoint_path(self.run / "checkpoints", CHECKED)
        temporary = self.checkpoint.with_name("new")
        temporary.mkdir(parents=True)
        mark_complete(temporary, self.checkpoint, manifest)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Trial(tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def lose(path: Path) -> None:
    path.unlink()


def change_manifest(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 1000}))


def replace_by_other_files(trial: Trial) -> None:
    (trial.run / "config.yaml").unlink()


# name -> (overrides, damage done before, what the line must say)
MISTAKES: dict[str, tuple[list[str], Callable[[Trial], object] | None, tuple[str, ...]]] = {
    "unknown_key": (["train.stepz=3"], None, ("unknown key", "stepz", "did you mean steps?")),
    "unknown_section": (["trian.steps=3"], None, ("unknown section", "did you mean train?")),
    "wrong_type": (["train.steps=many"], None, ("train.steps", "'many'", "a whole number")),
    "impossible_layout": (["parallel.tensor=2"], None, ("number of ranks", "multiples of 2")),
    "gate_group": (["parallel.gate_group=5"], None, ("parallel.gate_group", "set parallel.gate_group=1")),
    "batch": (["train.global_batch_size=3"], None, ("train.global_batch_size", "multiples of 2")),
    "no_data": (["data.train=[]"], None, ("data.train: got nothing",)),
    "missing_bin": ([], lambda trial: lose(trial.data.with_suffix(".bin")), ("train.bin", "missing")),
    "missing_index": ([], lambda trial: lose(trial.data.with_suffix(".idx")), ("train.idx", "missing")),
    "truncated_bin": ([], lambda trial: truncate(trial.data.with_suffix(".bin")), ("train.bin", "cut off")),
    "truncated_index": ([], lambda trial: truncate(trial.data.with_suffix(".idx")), ("train.idx", "file size")),
    "large_ids": ([], lambda trial: change_manifest(trial.data.with_suffix(".json")), ("vocab_size", "1000")),
    "blend": (["data.train=[0.5,a,b]"], None, ("data.train", "positive weights")),
    "other_architecture": (
        ["model.hidden_size=48", "run.dir={run}2", "checkpoint.load={run}"],
        None,
        ("of another architecture", "model.hidden_size: checkpoint 24, configuration 48"),
    ),
    "folder_of_another_model": (["model.hidden_size=48"], None, ("folder of another run", "model.hidden_size")),
    "folder_of_another_run": (["run.name=mine"], None, ("folder of another run", "'tiny'", "'mine'")),
    "folder_of_something_else": ([], replace_by_other_files, ("run.dir", "no config.yaml of a run")),
    "file_as_folder": (["run.dir={config}"], None, ("run.dir", "is a file")),
    "file_above_folder": (["run.dir={config}/below/it"], None, ("run.dir", "is a file")),
    "optimizer": (["optimizer.distributed=true"], None, ("optimizer.distributed", "set optimizer.distributed=false")),
    "other_batch": (["train.global_batch_size=8"], None, ("global_batch_size, seq_length", "keep them")),
    "other_length": (["train.seq_length=8"], None, ("global_batch_size, seq_length", "keep them")),
    "never": (["checkpoint.resume=never"], None, ("checkpoint.resume=never", "already holds checkpoints")),
    "required": (["checkpoint.resume=required", "run.dir={run}2"], None, ("checkpoint.resume=required",)),
    "no_checkpoint": (["run.dir={run}2", "checkpoint.load={run}3"], None, ("run3 does not exist",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_line_and_exit_code_2(trial: Trial, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, damage, expected = MISTAKES[name]
    if damage is not None:
        damage(trial)
    places = {"run": trial.run, "config": trial.config}
    code = main([str(trial.config), *(override.format(**places) for override in overrides), "--check"])
    streams = capsys.readouterr()
    assert code == 2, streams
    lines = [line for line in streams.err.splitlines() if "writing" not in line]  # progress of the data set
    assert len(lines) == 1 and lines[0].startswith("error: "), streams.err
    assert all(text in lines[0] for text in expected), lines[0]
    assert "ok" not in streams.out


@pytest.mark.parametrize("arguments", [[], ["--check"], ["nowhere.yaml"], ["quickstart", "--checks"]])
def test_a_wrong_command_line(trial: Trial, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_right_passes_and_changes_nothing(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(trial.run.rglob("*"))
    assert main([str(trial.config), "--check"]) == 0
    assert f"resumes {trial.checkpoint}" in capsys.readouterr().out
    assert main([str(trial.config), f"run.dir={trial.run}2", "--check"]) == 0
    assert "starts from the beginning" in capsys.readouterr().out
    assert sorted(trial.run.rglob("*")) == before
    assert not Path(f"{trial.run}2").exists()


def test_a_torn_checkpoint_is_passed_over(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    newer = checkpoint_path(trial.run / "checkpoints", 9)
    trial.checkpoint.parent.joinpath("copy").mkdir()
    mark_complete(trial.checkpoint.parent / "copy", newer, Manifest(**{**asdict(_manifest_of(trial)), "step": 9}))
    assert main([str(trial.config), "--check"]) == 0
    assert f"resumes {newer}" in capsys.readouterr().out
    (newer / "COMPLETE").unlink()
    assert main([str(trial.config), "--check"]) == 0
    assert f"resumes {trial.checkpoint}" in capsys.readouterr().out


def _manifest_of(trial: Trial) -> Manifest:
    return Manifest(**json.loads((trial.checkpoint / "manifest.json").read_text()))

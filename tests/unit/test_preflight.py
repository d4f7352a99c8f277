"""Mistakes that `python -m egmla_megatron.train CONFIG --check` must find: one line on stderr, exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from egmla_megatron.checkpoint.manifest import Manifest, checkpoint_path, mark_complete
from egmla_megatron.config.load import architecture, load_config, to_dict
from egmla_megatron.train.main import main
from egmla_megatron.train.run_dir import write_config
from tests.tiny import write_run, write_tokenizer

CHECKED = 4  # steps of the checkpoint


class Trial:
    """A run folder with a checkpoint, and the outcome of one --check."""

    def __init__(self, folder: Path) -> None:
        self.config, self.run = write_run(folder, "run")
        self.data = folder / "data/train"
        cfg = load_config(self.config)
        write_config(cfg)
        self.save([])

    def save(self, overrides: list[str]) -> None:
        """The checkpoint, of the configuration with `overrides`."""
        cfg = load_config(self.config, overrides)
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
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
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


def break_tokenizer(trial: Trial) -> None:
    for name in ("tokenizer_config.json", "tokenizer.json"):
        trial.data.with_name(name).write_text("{]")


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
    "little_validation": (
        ["train.micro_batch_size=64", "train.global_batch_size=64", "run.dir={run}2"],
        None,
        ("data.valid: got 3", "samples of 16 tokens, allowed at least 64", "or none (data.valid=[])"),
    ),
    "suffix": (["data.train=[{data}/train.bin]"], None, ("data.train: got", "drop the suffix: ", "data/train")),
    "suffix_of_an_index": (["data.valid=[{data}/valid.idx]"], None, ("data.valid: got", "drop the suffix: ")),
    "too_many_samples": (
        ["data.train=[1,{data}/train]", "train.steps=2e9", "run.dir={run}2"],
        None,
        ("train.steps: got 2000000000 steps of 4 sequences on data with weights", "allowed 2147483647"),
    ),
    "seed": (["run.seed=5000000000"], None, ("run.seed", "at most 4294967295")),
    "other_seed": (["run.seed=8"], None, ("run.seed: got 8", "was trained with 7", "keep 7")),
    "other_data": (["data.train=[{data}/valid]"], None, ("data.train: got ['valid']", "trained with ['train']")),
    "more_data": (["data.train=[{data}/train,{data}/valid]"], None, ("data.train: got ['train', 'valid']",)),
    "other_end_of_document": (["data.eod_id=1"], lambda trial: trial.save(["data.eod_id=0"]), ("data.eod_id: got 1",)),
    "other_length_of_a_weighted_run": (
        ["data.train=[1,{data}/train]", "train.steps=20"],
        lambda trial: trial.save([f"data.train=[1,{trial.data}]"]),
        ("train.steps (the data have weights): got 20", "trained with 12"),
    ),
    "no_run_folder": (["run.dir="], None, ("run.dir: got ''", "the path of a folder")),
    "root_as_run_folder": (["run.dir=/"], None, ("run.dir: got /, the root",)),
    "unwritable_run_folder": (["run.dir=/proc/x"], None, ("run.dir: got /proc/x, which cannot be written",)),
    "endless_run_folder": (["run.dir=" + "x" * 300], None, ("run.dir: got xxx", "File name too long")),
    "endless_cache": (["data.cache_dir=" + "x" * 300], None, ("data.cache_dir: got xxx", "File name too long")),
    "unwritable_cache": (["data.cache_dir=/proc/x"], None, ("data.cache_dir: got /proc/x, which cannot be written",)),
    "file_as_cache": (["data.cache_dir={config}/x"], None, ("data.cache_dir: got", "is a file")),
    "no_tokenizer": (["data.tokenizer={run}/none"], None, ("data.tokenizer: got", "which is not there")),
    "name_of_a_tokenizer": (["data.tokenizer=gpt2"], None, ("data.tokenizer: got 'gpt2', which is not there",)),
    "broken_tokenizer": (
        ["data.tokenizer={data}/t.model"],
        lambda trial: trial.data.with_name("t.model").write_bytes(b"no model"),
        ("data.tokenizer: ", "is not a sentencepiece model"),
    ),
    "broken_tokenizer_folder": (["data.tokenizer={data}"], break_tokenizer, ("data.tokenizer: ", "does not load")),
    "large_tokenizer": (
        ["data.tokenizer={data}/t.model"],
        lambda trial: write_tokenizer(trial.data.with_name("t.model"), eos_id=2),
        ("data.tokenizer: got", "with 300 ids, allowed at most model.vocab_size = 64"),
    ),
    "tokenizer_without_end": (
        ["data.tokenizer={data}/t.model"],
        lambda trial: write_tokenizer(trial.data.with_name("t.model"), eos_id=-1),
        ("data.tokenizer: ", "has no end-of-document (eos) piece"),
    ),
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
    "precision": (["train.precision=bf16"], None, ("saved with fp32 and optimizer.dist", "set train.precision=fp32")),
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
    places = {"run": trial.run, "config": trial.config, "data": trial.data.parent}
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
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    if "nowhere.yaml" not in arguments:
        assert "CONFIG [section.key=value ...] [--check]; settings may be left out" in said


def test_what_is_right_passes_and_changes_nothing(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(trial.run.rglob("*"))
    assert main([str(trial.config), "--check"]) == 0
    said = capsys.readouterr().out
    sizes = "TP 1 PP 1 DP 1 gate group 1, 2 micro-batches of a rank a step"
    assert said == f"ok: 1 rank as {sizes}; resumes {trial.checkpoint}\n"
    assert main([str(trial.config), f"run.dir={trial.run}2", "--check"]) == 0
    assert "starts from the beginning" in capsys.readouterr().out
    assert sorted(trial.run.rglob("*")) == before
    assert not Path(f"{trial.run}2").exists()


def test_a_fitting_tokenizer_passes(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    path = trial.data.with_name("t.model")
    write_tokenizer(path, eos_id=2)
    overrides = ["model.vocab_size=320", f"run.dir={trial.run}2", f"data.tokenizer={path}"]
    assert main([str(trial.config), *overrides, "--check"]) == 0, capsys.readouterr().err


def test_only_the_first_rank_says_ok(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        capsys.readouterr()
        assert main([str(trial.config), "--check"]) == 0
        assert capsys.readouterr().out.count("\n") == lines


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["abc", "-1", "1.5", "9" * 30])
def test_a_launcher_variable_that_is_no_number(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setattr("egmla_megatron.train.main.ALONE_AFTER_S", 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the report of a rank that is not the first sets one
    monkeypatch.setenv(name, value)
    capsys.readouterr()
    assert main([str(trial.config), "--check"]) == 2
    errors = capsys.readouterr().err
    assert f"{name}: got {value}, allowed a whole number from" in errors and errors.count("\n") == 1


def test_checking_needs_no_torch(trial: Trial, root: Path) -> None:
    code = "import sys; from egmla_megatron.train.main import main; code = main(sys.argv[1:]); "
    code += "sys.exit(code or any(name in sys.modules for name in ('torch', 'megatron', 'transformers')))"
    command = [sys.executable, "-c", code, str(trial.config), "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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

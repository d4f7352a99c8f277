"""The quickstart checks its command line, its layout and its folder before it replaces a former run."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tqdm import TMonitor

from egmla_megatron.errors import UserError
from egmla_megatron.quickstart import __main__ as quickstart
from egmla_megatron.quickstart import supervise
from egmla_megatron.quickstart.supervise import Launch, run_training
from tests.tiny import write_dataset


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A former quickstart's folder, with a run in it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").touch()
    (tmp_path / quickstart.MARKER).write_text("{}")
    return tmp_path


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGMLA_NPROC", "2")


def start(monkeypatch: pytest.MonkeyPatch, out: Path | str, *overrides: str) -> list[list[str]]:
    """Runs `main` up to the work itself; returns the overrides that reached it."""
    reached: list[list[str]] = []

    class Reached(Exception):
        pass

    def work(out: Path, extra: list[str]) -> None:
        reached.append(extra)
        raise Reached

    monkeypatch.setattr(sys, "argv", ["quickstart", "--out", str(out), *overrides])
    monkeypatch.setattr(quickstart, "_result", work)
    with pytest.raises(Reached):
        quickstart.main()
    return reached


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["train.stepz=3"], "2", "unknown key in section train"),
        (["train.steps=many"], "2", "train.steps: got 'many'"),
        (["train.steps=5"], "2", "optimizer.warmup_steps"),
        (["parallel.tensor=3"], "2", "number of ranks is no multiple"),
        (["train.global_batch_size=3"], "2", "train.global_batch_size"),
        (["train.cuda_graph=true"], "2", "train.cuda_graph: got true"),
        (["parallel.attention_backend=cudnn"], "2", "parallel.attention_backend: that kernel runs on GPUs"),
        (["parallel.attention_backend=flash"], "2", "parallel.attention_backend: on a CPU that kernel wants heads"),
        (["data.reset_attention_mask=true"], "2", "data.reset_attention_mask: got true"),
        (["data.cache_dir=/proc/x"], "2", "data.cache_dir: got /proc/x"),
        (["checkpoint.load=/gone"], "2", "/gone"),
        (["model.vocab_size=100"], "2", "model.vocab_size: got 100; allowed: at least 8192"),
        (["checkpoint.resume=never"], "2", "checkpoint.resume: the quickstart starts anew"),
        (["checkpoint.interval_steps=0"], "2", "got 0 in a run of 110 steps; allowed: 1 to 101"),
        (["train.steps=30"], "2", "got 30 in a run of 30 steps; allowed: 1 to 21"),
        (["train.exit_after_steps=5"], "2", "train.exit_after_steps: the quickstart trains to the end"),
        (["run.dir=elsewhere"], "2", "run.dir: got 'run.dir=elsewhere', but the quickstart makes its own"),
        (["data.train=[mine]"], "2", "choose the folder with --out"),
        ([], "abc", "EGMLA_NPROC: got abc, allowed a whole number from 1"),
        ([], "0", "EGMLA_NPROC: got 0, allowed a whole number from 1"),
        ([], "3", "train.global_batch_size"),
        (["--nonsense"], "2", "command line: unrecognized arguments: --nonsense"),
    ],
)
def test_a_mistake_leaves_the_former_run_alone(
    former: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], ranks: str, message: str
) -> None:
    monkeypatch.setenv("EGMLA_NPROC", ranks)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["quickstart", "--out", str(former), *overrides])
    with pytest.raises(UserError) as caught:
        quickstart.main()
    assert message in str(caught.value)
    assert (former / "run" / "precious").exists()
    assert (former / quickstart.MARKER).read_text() == "{}"


def test_the_trainers_word_is_passed_on_without_its_prefix(tmp_path: Path) -> None:
    launch = Launch(1, "quickstart", ["train.stepz=3"], tmp_path / "run", tmp_path / "log")
    with pytest.raises(UserError) as caught:
        run_training(launch, 1, "train")
    message = str(caught.value)
    assert message.startswith("training ended with exit code 2: override 'train.stepz=3': unknown key")
    assert "error:" not in message and message.endswith(f"(log: {tmp_path / 'log'})")


TRAINER = """
import signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    open(sys.argv[1] + "/saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(sys.argv[1] + "/trains", "w").close()
time.sleep(60)
"""
QUICKSTART = """
import sys
from pathlib import Path
from egmla_megatron.quickstart.supervise import Launch, run_training
from tests.tiny import write_dataset
class Stand(Launch):
    def command(self):
        return [sys.executable, "-c", sys.argv[2], sys.argv[1]]
folder = Path(sys.argv[1])
run_training(Stand(1, "", [], folder / "run", folder / "log"), 10, "train")
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_trainer_ends_with_the_quickstart(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", QUICKSTART, str(tmp_path), TRAINER], stderr=subprocess.DEVNULL)
    try:
        wait_for(tmp_path / "trains")
        process.send_signal(number)
        code = process.wait(30)
    finally:
        process.kill()
    if number == signal.SIGKILL:
        wait_for(tmp_path / "saved")
    else:
        assert code == 128 + number and (tmp_path / "saved").exists()  # it waited for the trainer


def test_a_handler_that_python_did_not_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[int] = []
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", lambda number, handler: changed.append(number))
    with supervise._leaving_by_exception():
        assert changed == [signal.SIGHUP]
    assert changed == [signal.SIGHUP] * 2


def monitors() -> set[threading.Thread]:
    """Threads of progress bars."""
    return {thread for thread in threading.enumerate() if isinstance(thread, TMonitor)}


def test_the_trainer_is_not_forked_beside_the_bar_s_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[set[threading.Thread]] = []
    before = monitors()

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            beside.append(monitors() - before)
            super().__init__(*arguments, **options)

    class Nothing(Launch):
        def command(self) -> list[str]:
            return [sys.executable, "-c", ""]

    write_dataset(tmp_path / "data")  # as the quickstart does before
    monkeypatch.setattr(subprocess, "Popen", Watched)
    for _ in range(2):  # the quickstart trains twice
        assert not run_training(Nothing(1, "", [], tmp_path / "run", tmp_path / "log"), 1, "train")
    assert beside == [set(), set()]


def test_without_a_mistake_the_former_run_is_replaced(
    former: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert start(monkeypatch, former, "train.steps=50") == [["train.steps=50"]]
    assert not (former / "run").exists()
    assert "replacing the run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", "--out: got '', allowed the path of a folder"),
        ("/", "--out: got /, the root of the file system"),
        ("/proc/x", "--out: got /proc/x, which cannot be written"),
        ("{tmp}/file", "is a file; choose another folder"),
        ("{tmp}/file/below", "is a file; choose another folder"),
        ("{tmp}", "is not a former quickstart's folder"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, message: str) -> None:
    (tmp_path / "file").write_text("precious")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["quickstart", "--out", out.format(tmp=tmp_path)])
    with pytest.raises(UserError) as caught:
        quickstart.main()
    assert message in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("gpus", "wanted", "ranks", "gate_group"),
    [(0, "", 2, 2), (0, "1", 1, 1), (0, "4", 4, 4), (1, "", 1, 1), (3, "", 2, 2), (8, "", 4, 4), (8, "8", 8, 8)],
)
def test_layout(monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: str, ranks: int, gate_group: int) -> None:
    monkeypatch.setenv("EGMLA_NPROC", wanted)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    found, overrides = quickstart._layout()
    assert found == ranks
    assert f"parallel.gate_group={gate_group}" in overrides
    assert ("run.deterministic=true" in overrides) is (gpus > 0)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match="EGMLA_NPROC: got 2, allowed a whole number from 1 to 1"):
        quickstart._layout()


def test_the_table_has_the_columns_that_the_layout_counts_on() -> None:
    from egmla_megatron.config.load import load_config

    assert load_config(quickstart.CONFIG).model.kv_emb_dim == quickstart.TABLE_COLUMNS

"""Runs that are killed go on where they stopped; a worker's death ends the run at once and says how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from egmla_megatron.errors import UserError
from egmla_megatron.preprocess import command
from tests.preprocess import documents, parts_of, run, stored, write_jsonl, write_parquet

ROWS = documents(3000)
OPTIONS = {"shuffle": True, "validation_fraction": 0.1}


def drive(what: str, out: Path, *inputs: str) -> subprocess.CompletedProcess[str]:
    """The driver's run, which must end within a minute."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(Path(__file__).with_name("preprocess_driver.py")), what, str(out), *inputs]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(root)}
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    return [write_jsonl(folder / "a.jsonl", ROWS), write_jsonl(folder / "b.jsonl.gz", documents(500, 1))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, inputs: list[str]) -> Path:
    """The outputs of a run that nothing interrupted."""
    prefix = tmp_path_factory.mktemp("whole") / "out"
    with parts_of(20_000):
        run(prefix, *inputs, **OPTIONS)
    return prefix


def same_files(one: Path, two: Path) -> bool:
    names = ("{}.bin", "{}.idx", "{}_val.bin", "{}_val.idx")
    return all(Path(name.format(one)).read_bytes() == Path(name.format(two)).read_bytes() for name in names)


@pytest.mark.parametrize("what", ["kill", "kill with workers", "kill while merging"])
def test_after_kill_9_the_same_command_goes_on(tmp_path: Path, inputs: list[str], whole: Path, what: str) -> None:
    killed = drive(what, tmp_path / "out", *inputs)
    assert killed.returncode == -9
    assert not [
        file for file in tmp_path.glob("out*.*") if file.suffix in (".bin", ".idx", ".json")
    ]  # nothing that looks complete
    folder = tmp_path / "out.parts"
    before = len(list(folder.glob("*[0-9].json")))
    assert before >= 2
    again = drive("none", tmp_path / "out", *inputs)
    assert again.returncode == 0, again.stderr
    total = int(again.stdout.split(" parts; ids")[0].split()[-1])
    assert f"{before} of {total} parts are there already" in again.stdout and total > 10
    assert same_files(tmp_path / "out", whole) and not folder.exists()


def test_finished_parts_are_not_done_again(tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    convert = command.convert_parts
    monkeypatch.setattr(
        command, "convert_parts", lambda p, numbers, *rest: (done.extend(numbers), convert(p, numbers, *rest))
    )
    with parts_of(20_000):
        with pytest.raises(FileNotFoundError):
            run(tmp_path / "out", *inputs, shard=0, shards=2)
        first = set(done)
        (tmp_path / "out.parts" / "00002.json").unlink()  # as if killed before the last rename
        done.clear()
        run(tmp_path / "out", *inputs)
    assert 2 in done and not (first - {2}) & set(done) and len(first) > 3


def test_killed_at_the_very_end(
    tmp_path: Path, inputs: list[str], whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the renames, and after them: the next run completes without --overwrite."""
    from egmla_megatron.preprocess import outputs

    class Killed(BaseException):
        pass

    moved: list[str] = []
    move = outputs.move_into_place

    def stop_at_second(prefix: str, partial: dict[str, Path]) -> None:
        if moved:
            raise Killed
        moved.append(prefix)
        move(prefix, partial)

    with parts_of(20_000):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(outputs, "move_into_place", stop_at_second)
            run(tmp_path / "out", *inputs, **OPTIONS)
        assert (tmp_path / "out_val.json").exists() and not (tmp_path / "out.json").exists()
        with pytest.raises(UserError, match="exist, expected nothing there"):
            run(tmp_path / "out", *inputs, **{**OPTIONS, "seed": 99})  # others than those that were being moved
        run(tmp_path / "out", *inputs, **OPTIONS)
        assert same_files(tmp_path / "out", whole)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(command.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(Killed))
            run(tmp_path / "out", *inputs, overwrite=True, **OPTIONS)
        assert (tmp_path / "out.parts").exists()
        run(tmp_path / "out", *inputs, **OPTIONS)
    assert same_files(tmp_path / "out", whole) and not (tmp_path / "out.parts").exists()


@pytest.mark.parametrize("what", ["kill worker", "kill starting worker"])
def test_a_killed_worker_ends_the_run(tmp_path: Path, inputs: list[str], what: str) -> None:
    done = drive(what, tmp_path / "out", *inputs)
    assert done.returncode == 1
    assert "WorkerDiedError: worker with part" in done.stderr and "died with signal 9 (SIGKILL)" in done.stderr
    assert "a.jsonl" in done.stderr and not (tmp_path / "out.bin").exists()


def test_a_failing_worker_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    done = drive(
        "bug", tmp_path / "out", *[write_parquet(tmp_path / f"{i}.parquet", ROWS, group=500) for i in range(2)]
    )
    assert done.returncode == 1 and "WorkerDiedError: worker with part" in done.stderr
    assert 'KeyError: \'Field "gone" does not exist' in done.stderr and "read_parquet.py" in done.stderr


def test_a_mistake_ends_both_threads_of_one_process(tmp_path: Path) -> None:
    """Finished parts are kept, nothing half-written is, and the parts behind are not begun."""
    paths = [write_parquet(tmp_path / f"{number:02}.parquet", documents(200, number), group=50) for number in range(40)]
    write_parquet(tmp_path / "05.parquet", [[1], [100]])
    with parts_of(2000), pytest.raises(UserError, match=r"05\.parquet, row group 0, row 1: id 100"):
        run(tmp_path / "out", *paths)
    finished = {file.stem for file in (tmp_path / "out.parts").glob("*[0-9].json")}
    assert 0 < len(finished) < 100  # of over two hundred
    assert {file.stem for file in (tmp_path / "out.parts").glob("*.bin")} == finished
    assert not list((tmp_path / "out.parts").glob("*.tmp"))


def test_a_mistake_that_a_worker_finds_is_one_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*ROWS, [100], *ROWS])
    done = drive("none", tmp_path / "out", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "x.jsonl, line 3001: id 100 at token 0, allowed 0 to 99" in done.stderr


def test_workers_do_not_outlive_their_parent(tmp_path: Path, inputs: list[str]) -> None:
    assert drive("kill with workers", tmp_path / "out", *inputs).returncode == -9
    workers = [int(pid) for pid in (tmp_path / "out.workers").read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 30  # they notice at their next report
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_runs, workers))


def _runs(pid: int) -> bool:
    """Whether there is such a process and it is more than an entry nobody collected."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_two_runs_at_the_same_task(tmp_path: Path, inputs: list[str]) -> None:
    import fcntl

    folder = tmp_path / "out.parts"
    folder.mkdir()
    with (folder / "task0-of-1.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is at this task"):
            run(tmp_path / "out", *inputs)
    run(tmp_path / "out", *inputs)
    assert json.loads((tmp_path / "out.json").read_text())["documents"] == len(stored(tmp_path / "out"))

"""What goes wrong in practice, through the real command line: signals, dead ranks, NaN, full disks, torn files.

Where it matters which processes there are, and who ends whom, starts are cold.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.dist.harness import Job, events, start_trainer
from tests.tiny import write_run

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(500)]
LONG = 100_000  # steps that no test waits for


def wait_for_steps(job: Job) -> None:
    job.wait_for("step       3/")


def ranks_of(job: Job) -> dict[int, psutil.Process]:
    """The trainer processes below a job, by rank."""
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process(job.process.pid).children(recursive=True):  # parents before their children
        if "egmla_megatron.train" in child.cmdline() and "RANK" in child.environ():
            found.setdefault(int(child.environ()["RANK"]), child)  # loader workers look the same
    return found


def error_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


def checkpoints(run: Path) -> list[int]:
    from egmla_megatron.checkpoint.manifest import complete_checkpoints, step_of

    return [step_of(path) for path in complete_checkpoints(run / "checkpoints")]


def test_stop_signals_save_and_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """Ctrl-C on one rank alone, then SIGTERM to the launcher of two: each run resumes where the other stopped."""
    config, run = write_run(tmp_path, "run", train={"steps": LONG})
    alone = start_trainer(1, tmp_path / "interrupted.log", config, warm=False)
    wait_for_steps(alone)
    os.kill(alone.process.pid, signal.SIGINT)
    assert alone.wait() == 128 + signal.SIGINT, alone.output
    assert "Traceback" not in alone.output
    first = checkpoints(run)
    assert len(first) == 1 and events(run, "end")[-1]["step"] == first[0]

    shutil.copytree(run / f"checkpoints/step_{first[0]:08d}", run / "checkpoints/step_00090000")
    (run / "checkpoints/step_00090000/COMPLETE").unlink()  # a newer one, cut off before its marker
    shutil.copytree(run / f"checkpoints/step_{first[0]:08d}", run / "checkpoints/step_00090001")
    manifest = run / "checkpoints/step_00090001/manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    interval = f"checkpoint.interval_steps={first[0] + 2}"
    overrides = ["parallel.gate_group=2", interval, "data.num_workers=1"]
    both = start_trainer(2, tmp_path / "terminated.log", config, *overrides, warm=False)
    both.wait_for(f"step_{first[0] + 2:08d}  ")  # saved once: megatron-core's queue process is there too
    both.wait_for(f"step {first[0] + 3:>7}/")
    for rank in ranks_of(both).values():  # as Slurm does: to every process below the launcher
        helpers = rank.children(recursive=True)
        assert len(helpers) >= 2, helpers  # a loader worker, the queue
        for process in (*helpers, rank):
            process.send_signal(signal.SIGTERM)
    assert both.wait() != 0
    assert f"exitcode  : {128 + signal.SIGTERM}" in both.output, both.output[-3000:]
    second = checkpoints(run)
    assert len(second) == 3 and second[-1] >= first[0] + 3
    assert events(run, "start")[-1]["step"] == first[0]
    assert events(run, "end")[-1]["step"] == second[-1]


def test_dead_and_hung_ranks_are_named_and_end_the_others(tmp_path: Path) -> None:
    """Two jobs at once, since both mostly wait. A hung (here: stopped) rank breaks no connection: only its missing
    sign of life tells."""
    dead, hung = (
        start_trainer(
            2, tmp_path / f"{name}.log", write_run(tmp_path, name, train=train)[0], "parallel.gate_group=2", warm=False
        )
        for name, train in (
            ("dead", {"steps": LONG, "peer_timeout_s": 10.0}),
            ("hung", {"steps": LONG, "peer_timeout_s": 6.0}),
        )
    )
    wait_for_steps(hung)
    stopped = ranks_of(hung)[0]
    stopped.suspend()
    wait_for_steps(dead)
    ranks = ranks_of(dead)
    ranks[1].kill()
    dead.limit_s = time.monotonic() - dead.started + 60  # the promise: within a minute
    assert dead.wait() != 0
    assert not ranks[0].is_running()
    named = [line for line in error_lines(dead.output) if "rank 1 (" in line]
    assert len(named) == 1 and "resume" in named[0] and f"pid {ranks[1].pid}" in named[0], dead.output[-3000:]
    hung.wait_for("rank 0 (")
    stopped.kill()
    assert hung.wait() != 0
    assert "gave no sign of life for 6 s" in error_lines(hung.output)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of four steps in good order, with checkpoints after the second and the fourth."""
    folder = tmp_path_factory.mktemp("trained")
    config, run = write_run(folder, "run", train={"steps": 4}, checkpoint={"interval_steps": 2})
    start_trainer(1, folder / "log", config).succeed()
    assert checkpoints(run) == [2, 4]
    return run


def continued(tmp_path: Path, trained: Path, name: str = "run") -> tuple[Path, Path]:
    """(configuration, run folder) of a copy of the trained run."""
    config, run = write_run(tmp_path, name)
    shutil.copytree(trained / "checkpoints", run / "checkpoints")
    shutil.copy(trained / "config.yaml", run)
    return config, run


def test_a_run_without_a_single_update_has_nothing_to_save(tmp_path: Path) -> None:
    """Its optimizer has no states yet, and a checkpoint without them could not be loaded."""
    checkpoint = {"interval_steps": 1, "at_end": True}
    for distributed in (True, False):
        optimizer = {"distributed": distributed}
        name = f"run_{distributed}"
        config, run = write_run(tmp_path, name, train={"max_bad_steps": 3}, checkpoint=checkpoint, optimizer=optimizer)
        # norms then divide by so little that gradients overflow in the first step
        job = start_trainer(1, tmp_path / "log", config, "model.init_std=1e-25", "model.rms_norm_eps=1e-38")
        assert job.wait() == 2
        assert "3 steps in a row gave no finite gradient" in job.output and "Traceback" not in job.output
        assert list((run / "checkpoints").glob("*")) == []


def test_steps_that_are_not_finite_are_skipped_then_stop_the_run(tmp_path: Path, trained: Path) -> None:
    config, run = continued(tmp_path, trained)
    overrides = ["train.steps=50", "train.max_bad_steps=3", "checkpoint.interval_steps=1"]
    overrides += ["optimizer.lr=1000", "optimizer.gate_table_lr_ratio=1000", "optimizer.weight_decay=1000"]
    job = start_trainer(1, tmp_path / "log", config, *overrides)
    assert job.wait() == 2, job.output[-3000:]
    errors = error_lines(job.output)
    assert len(errors) == 1 and "3 steps in a row" in errors[0] and "optimizer.lr" in errors[0]
    skipped = [event["step"] for event in events(run, "step") if event["skipped"]]
    assert len(skipped) == 3 and skipped == list(range(skipped[0], skipped[0] + 3))
    assert events(run, "end") == []
    assert checkpoints(run)[-1] == skipped[0] - 1 and f"goes on from step_{skipped[0] - 1:08d}" in errors[0]
    start_trainer(1, tmp_path / "again.log", config, *overrides, "train.exit_after_steps=2").succeed()
    before, after = (weights(run, step) for step in checkpoints(run)[-2:])
    assert all(first.equal(second) for first, second in zip(before, after, strict=True))


def weights(run: Path, step: int) -> list[Any]:
    from egmla_megatron.checkpoint.load import read_full_weights

    return list(read_full_weights(run / f"checkpoints/step_{step:08d}")[0].values())


def test_damaged_checkpoints_are_named_and_never_begun_anew_over(tmp_path: Path, trained: Path) -> None:
    """A changed byte of the newest, five bytes less of it, five bytes less of the other, too. Another run, to which a
    person has named the changed one, is refused."""
    config, run = continued(tmp_path, trained)
    newest, older = (run / f"checkpoints/step_{step:08d}" for step in (4, 2))
    data = next(newest.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[content.index(b"PK\x07\x08") - 5] ^= 1  # before the record that follows the contents of an entry
    data.write_bytes(content)
    named = start_trainer(1, tmp_path / "named.log", write_run(tmp_path, "other")[0], f"checkpoint.load={newest}")
    assert named.wait() == 2 and f"{newest} is damaged ({data.name}: 1 files with 1 pieces" in named.output
    short = ["train.steps=5", "train.exit_after_steps=1", "checkpoint.at_end=false", "checkpoint.interval_steps=0"]
    output = start_trainer(2, tmp_path / "changed.log", config, *short, "parallel.gate_group=2").succeed()
    warning = f"warning: checkpoint: {newest} is damaged and passed over ({data.name}: 1 files with 1 pieces"
    assert output.count(warning) == 1 and "start    step 2 of 5, resuming" in output
    (left,) = events(run, "start")[-1]["passed_over"]
    assert left.startswith(f"{newest.name}: {data.name}") and checkpoints(run) == [2]
    (newest / "DAMAGED").unlink()
    os.truncate(data, len(content) - 5)
    job = start_trainer(1, tmp_path / "newest.log", config, *short)
    warning = f"warning: checkpoint: {newest} is damaged and passed over ({data.name} has"
    assert job.succeed().count(warning) == 1 and "start    step 2 of 5, resuming" in job.output
    other = next(older.glob("*.distcp"))
    os.truncate(other, other.stat().st_size - 5)
    job = start_trainer(1, tmp_path / "both.log", config, "train.steps=5")
    assert job.wait() == 2 and len(error_lines(job.output)) == 1
    assert "all 2 checkpoints in" in error_lines(job.output)[0] and "start    step" not in job.output
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [older.name, newest.name]


def test_disk_that_fills_up_loses_nothing(tmp_path: Path, trained: Path) -> None:
    """A limit on the size of files stands in for the full disk: the checkpoints of before must survive."""
    config, run = continued(tmp_path, trained)

    def limit_file_size() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing gives an error, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 * 1024, 32 * 1024))

    job = start_trainer(1, tmp_path / "log", config, "train.steps=6", warm=False, preexec=limit_file_size)
    assert job.wait() == 2, job.output[-3000:]
    errors = error_lines(job.output)
    assert len(errors) == 1 and "step_00000004 is intact" in errors[0], job.output[-3000:]
    assert "OSError" in errors[0] and "MiB are free" in errors[0]
    assert "Traceback" not in job.output
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000002", "step_00000004"]
    assert all(first.equal(second) for first, second in zip(weights(run, 4), weights(trained, 4), strict=True))


def test_an_id_that_only_one_rank_meets_is_the_only_error(tmp_path: Path) -> None:
    """The rank that reads it names it; the others end without guessing at its death."""
    config, _ = write_run(tmp_path, "run", train={"steps": LONG}, checkpoint={"at_end": False})
    tokens = tmp_path / "data" / "train.bin"
    (tmp_path / "data" / "train.json").unlink()  # with its checksums and its largest id
    content = bytearray(tokens.read_bytes())
    content[600:602] = (64).to_bytes(2, "little")  # token 300; the vocabulary ends at 63
    tokens.write_bytes(content)
    job = start_trainer(2, tmp_path / "log", config, "data.eod_id=0")
    assert job.wait() != 0, job.output
    (error,) = error_lines(job.output)
    assert "got token id 64" in error and "document" in error and "position" in error

"""Which checkpoint a start takes where bytes changed, and what it does about a disk that does not answer."""

from __future__ import annotations

import builtins
import errno
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from egmla_megatron.checkpoint import verify
from egmla_megatron.checkpoint.manifest import checkpoint_path, mark_complete
from egmla_megatron.checkpoint.verify import Changed, changed_pieces, find_changed
from egmla_megatron.checkpoint.write_weights import Piece, write_weights
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import MachineError
from egmla_megatron.train import setup
from egmla_megatron.train.setup import Claim, claim
from tests.tiny import tiny_run
from tests.unit.test_checkpoint_manifest import manifest

NUMBERS = torch.arange(4096, dtype=torch.float32)


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    """A run with the checkpoints 2 and 4."""
    found = tiny_run(folder=str(tmp_path / "run"))
    for step in (2, 4):
        final = checkpoint_path(tmp_path / "run/checkpoints", step)
        temporary = final.with_name(final.name + ".incomplete")
        temporary.mkdir(parents=True)
        write_weights([Piece("a", (4096,), (0,), (4096,), lambda: NUMBERS)], temporary, torch.float32)
        mark_complete(temporary, final, replace(manifest(step), weights_only=True))
    return found


@pytest.fixture
def start(cfg: RunConfig, world: Any) -> Iterator[Callable[[], Claim]]:
    """Claims the run as a start does; its lock is given up at the end."""
    claims: list[Claim] = []

    def one_start() -> Claim:
        claims.append(claim(cfg, world))
        return claims[-1]

    yield one_start
    for each in claims:
        assert each.lock is not None
        each.lock.close()


def path_of(cfg: RunConfig, step: int) -> Path:
    return checkpoint_path(Path(cfg.run.dir) / "checkpoints", step)


def flip(folder: Path, wanted: bytes = NUMBERS.numpy().tobytes()) -> Path:
    """One bit of a weight."""
    (path,) = folder.glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[content.index(wanted) + 4000] ^= 1
    path.write_bytes(content)
    return path


def marked(cfg: RunConfig) -> list[str]:
    return [path.parent.name for path in Path(cfg.run.dir).rglob("DAMAGED")]


class FailsWhenRead:
    """An open file of a disk that fails behind its back."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def seek(self, at: int) -> int:
        return int(self.file.seek(at))

    def read(self, count: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")  # without a name, as read(2) gives it


def fail_to_open(path: Any, mode: str) -> Any:
    raise OSError(errno.EIO, "Input/output error", str(path))


def fail_to_read(path: Any, mode: str) -> Any:
    return FailsWhenRead(builtins.open(path, mode))


@pytest.mark.parametrize("how", [fail_to_open, fail_to_read])
def test_a_disk_that_does_not_answer_marks_nothing(
    cfg: RunConfig, start: Any, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    monkeypatch.setattr(verify, "open", how, raising=False)
    with pytest.raises(
        MachineError, match=rf"rank 0 on {socket.gethostname()} cannot read .*\.distcp \(EIO: Input/out"
    ):
        start()
    assert marked(cfg) == []


def test_nor_does_one_that_gives_no_metadata(cfg: RunConfig, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: dcp.FileSystemReader) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", f"{self.path}/.metadata")

    monkeypatch.setattr(dcp.FileSystemReader, "read_metadata", fail)
    with pytest.raises(MachineError, match=r"rank 0 on .*\.metadata \(ESTALE: Stale file handle\)"):
        start()
    assert marked(cfg) == []


def test_a_failure_of_another_rank_is_this_one_s_error(
    cfg: RunConfig, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks' words come by one gathering, before that of what they found."""

    def gather(everyone: list[Any], mine: Any, group: Any) -> None:
        assert mine is None  # nothing to complain of here
        everyone[:] = [mine, MachineError("checkpoint: rank 1 on node7 cannot read data (EIO: Input/output error)")]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(MachineError, match="rank 1 on node7 cannot read data") as caught:
        find_changed(path_of(cfg, 4), replace(world, size=2))
    assert caught.value.exit_code == 1  # no mistake: a job under Slurm starts again


def test_a_changed_bit_is_marked_and_the_one_before_taken(cfg: RunConfig, start: Any) -> None:
    flip(path_of(cfg, 4))
    assert start().checkpoint == path_of(cfg, 2)
    assert marked(cfg) == ["step_00000004"]


@pytest.mark.parametrize("what", ["piece", ".metadata"])
def test_what_one_other_rank_alone_sees_is_not_marked(
    cfg: RunConfig, start: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    data = flip(path_of(cfg, 4))
    (seen,) = changed_pieces(path_of(cfg, 4))
    flip(path_of(cfg, 4), NUMBERS.numpy().tobytes()[:4000])  # back
    assert seen.name == data.name and changed_pieces(path_of(cfg, 4)) == []
    told = replace(seen, rank=3, host="node7") if what == "piece" else Changed(what, 0, 0, 3, "node7")
    monkeypatch.setattr(setup, "find_changed", lambda *_: [told])
    with pytest.raises(MachineError, match=r"reads as changed on rank 3 on node7 .*whole where rank 0 reads it again"):
        start()
    assert marked(cfg) == []


def test_one_that_cannot_be_marked_is_passed_over_by_this_start(
    cfg: RunConfig, start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, why: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    flip(path_of(cfg, 4))
    monkeypatch.setattr(setup, "mark_damaged", full)
    claimed = start()
    assert claimed.checkpoint == path_of(cfg, 2) and list(claimed.unmarked) == [path_of(cfg, 4)]
    warning = capsys.readouterr().err
    assert f"{path_of(cfg, 4)} is damaged and passed over" in warning and "No space left on device" in warning
    assert marked(cfg) == []


def test_what_another_rank_sees_and_rank_0_too_is_marked(
    cfg: RunConfig, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(path_of(cfg, 4))

    def by_another(*where: Any) -> list[Changed]:
        return [replace(each, rank=3, host="node7") for each in find_changed(*where)]

    monkeypatch.setattr(setup, "find_changed", by_another)
    assert start().checkpoint == path_of(cfg, 2)
    assert marked(cfg) == ["step_00000004"]


def test_a_second_look_that_fails_marks_nothing(cfg: RunConfig, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(path_of(cfg, 4))
    found = [replace(each, rank=3, host="node7") for each in changed_pieces(path_of(cfg, 4))]
    monkeypatch.setattr(setup, "find_changed", lambda *_: found)
    monkeypatch.setattr(verify, "open", fail_to_open, raising=False)
    with pytest.raises(MachineError, match=r"rank 0 on .* cannot read"):
        start()
    assert marked(cfg) == []


def test_a_name_that_changed_in_the_metadata_is_a_change(cfg: RunConfig) -> None:
    path = path_of(cfg, 4) / ".metadata"
    content = path.read_bytes()
    assert b"__0_0.distcp" in content
    path.write_bytes(content.replace(b"__0_0.distcp", b"__0_1.distcp"))
    assert [each.name for each in changed_pieces(path_of(cfg, 4))] == [".metadata"]

"""Disks that are full, closed or limited, and documents that the format cannot hold."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from egmla_megatron.errors import UserError
from egmla_megatron.preprocess import part as part_module
from egmla_megatron.preprocess.disk import writing_to
from tests.preprocess import documents, run, write_jsonl

GOOD = documents(20)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full answers every write as a full disk does."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    path = write_jsonl(tmp_path / "x.jsonl", GOOD)
    original = part_module.part_file

    def full(folder: Path, number: int, suffix: str) -> Path:
        name = original(folder, number, suffix)
        if suffix.startswith("bin.") and not name.is_symlink():
            name.symlink_to("/dev/full")
        return name

    with monkeypatch.context() as patch:
        patch.setattr(part_module, "part_file", full)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); free space.*are kept"):
            run(tmp_path / "out", path)
    assert not list(tmp_path.glob("out.*in")) and Path("/dev/full").exists()
    run(tmp_path / "out", path)  # space is there again


def test_a_file_size_limit_in_a_real_run(tmp_path: Path, root: Path) -> None:
    """The operating system refuses to let the file grow: one line, exit code 2, nothing half-written in place."""
    path = write_jsonl(tmp_path / "x.jsonl", documents(4000))
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    tool = [sys.executable, "-c", code, root / "tools" / "preprocess_data.py"]
    arguments = ["--input", path, "--output-prefix", tmp_path / "out", "--vocab-size", "100", "--eos-id", "99"]
    done = subprocess.run([*tool, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot be written (File too large)" in done.stderr
    assert not [file for file in tmp_path.glob("out*") if file.suffix in (".bin", ".idx", ".json")]


def test_an_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", GOOD)
    with pytest.raises(UserError, match="cannot be written"):
        run(Path(path) / "out", path)  # below a file
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o555)
        with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
            run(tmp_path / "locked" / "out", path)


def test_disk_errors_and_no_others_become_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x: cannot be written \(Read-only file system\)"), writing_to(Path("x")):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    with pytest.raises(OSError, match="Input/output error"), writing_to(Path("x")):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_document_too_long_for_the_format(tmp_path: Path) -> None:
    import numpy as np

    from egmla_megatron.data.index_file import write_index

    with pytest.raises(UserError, match="document 1: got 2147483648 tokens, allowed 2147483647"):
        write_index(tmp_path / "x.idx", np.array([1, 2**31]), np.dtype(np.uint16))
    write_index(tmp_path / "x.idx", np.array([1, 2**31 - 1]), np.dtype(np.uint16))
    assert struct.unpack_from("<ii", (tmp_path / "x.idx").read_bytes(), 34) == (1, 2**31 - 1)

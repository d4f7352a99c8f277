"""Folders that cannot be made or written are found out at once, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from egmla_megatron.errors import UserError
from egmla_megatron.folders import refuse_name, refuse_unwritable, write_result


def test_a_writable_folder_passes_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("there", "new", "new/below"):
        refuse_unwritable("--out", tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "is a file"),
        ("file/below", "is a file"),
        ("dangling", "is a file"),
        ("dangling/below", "is a file"),
        ("x" * 300, "File name too long"),
        ("new/" + "x" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_made(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"^--out: got .*{reason}.*; choose another folder$"):
        refuse_unwritable("--out", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def test_a_folder_that_even_root_cannot_write() -> None:
    with pytest.raises(UserError, match=r"^run\.dir: got /proc/x/y, which cannot be written"):
        refuse_unwritable("run.dir", "/proc/x/y")


@pytest.mark.parametrize("folder", ["", " ", "/", "//", "a\0b"])
def test_no_folder_at_all(folder: str) -> None:
    with pytest.raises(UserError, match=r"^--out: got "):
        refuse_name("--out", folder)


def test_a_name_that_the_file_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, reason in (("x" * 300, "File name too long"), ("loop/a", "symbolic links")):
        with pytest.raises(UserError, match=rf"^run\.dir: got .*{reason}"):
            refuse_name("run.dir", str(tmp_path / name))


def test_a_folder_by_name_is_fine(tmp_path: Path) -> None:
    refuse_name("--out", "runs/mine")
    refuse_name("--out", str(tmp_path))


def test_a_result_replaces_the_one_before_or_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("before")
    (tmp_path / "link.json").symlink_to("real.json")
    write_result("--json", tmp_path / "link.json", "now")
    assert (tmp_path / "real.json").read_text() == "now" and (tmp_path / "link.json").is_symlink()
    with pytest.raises(UserError, match=r"^--json: got /dev/full, which cannot be written \(No space left.*stdout"):
        write_result("--json", Path("/dev/full"), "later")
    with pytest.raises(UserError, match=r"^--json: got .*gone/x\.json, which cannot be written"):
        write_result("--json", tmp_path / "gone" / "x.json", "later")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]

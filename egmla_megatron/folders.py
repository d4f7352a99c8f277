"""Whether a folder or file can be made and written, found out before hours of work depend on it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from egmla_megatron.errors import UserError

__all__ = ["refuse_name", "refuse_unwritable", "refuse_unwritable_file", "replace_text", "write_result"]


def refuse_name(name: str, folder: str) -> None:
    """Refuse what can be no folder of ours: no name at all, an impossible one, the root of the file system. Reads only.

    Raises:
        UserError: starts with `name`, the setting or option that gave the folder.
    """
    if not folder.strip() or "\0" in folder:
        raise UserError(f"{name}: got {folder!r}, allowed the path of a folder; give one, for example runs/mine")
    if Path(folder).absolute() == Path(Path(folder).absolute().anchor):
        raise UserError(f"{name}: got {folder}, the root of the file system; choose a folder below it")
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return  # may still be made, or be refused with a better reason
    except OSError as error:  # a name that is too long, a loop of links, a folder that is closed to us
        raise UserError(
            f"{name}: got {folder}, which cannot be used ({error.strerror}); choose another folder"
        ) from error


def refuse_unwritable(name: str, folder: str | Path) -> None:
    """Refuse a folder that cannot be made or written, leaving nothing behind.

    Tries it in the nearest folder that is there: permission bits say nothing about root, /proc or a full disk.

    Raises:
        UserError: starts with `name`, the setting or option that gave the folder.
    """
    path = Path(folder).absolute()
    existing = next((parent for parent in (path, *path.parents) if os.path.lexists(parent)), path)
    if not existing.is_dir():
        raise UserError(f"{name}: got {folder}, but {existing} is a file; choose another folder")
    try:
        with tempfile.TemporaryDirectory(prefix=".egmla_probe_", dir=existing) as probe:
            for part in path.relative_to(existing).parts:
                (Path(probe) / part).mkdir()  # a name may be too long, whatever the folder allows
    except OSError as error:
        raise UserError(
            f"{name}: got {folder}, which cannot be written ({existing}: {error.strerror}); choose another folder"
        ) from error


def replace_text(path: Path, text: str) -> None:
    """Write a file by way of a temporary name: no reader sees half of it, and what was there outlives a failure."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_result(name: str, path: Path, text: str) -> None:
    """Write what a tool measured, beside which it prints a table. Through links, and straight into what is no file, a
    pipe say; else what was there outlives a full disk or a kill.

    Raises:
        UserError: starts with `name`, the option that gave the file.
    """
    target = path.resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
        else:
            replace_text(target, text)
    except OSError as error:
        raise UserError(
            f"{name}: got {path}, which cannot be written ({error.strerror or error}); the table is on stdout; free "
            "space or name another file, and repeat"
        ) from error


def refuse_unwritable_file(name: str, path: Path) -> None:
    """Refuse an output file that could not be written in a folder that is there, leaving nothing behind.

    Raises:
        UserError: starts with `name`, the option that gave the file.
    """
    if not os.path.isdir(path.parent):
        raise UserError(f"{name}: got {path}, allowed a file in a folder that exists; make {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{name}: got {path}, allowed a file that can be written; name another")
    if not path.exists():
        refuse_unwritable(name, path.parent)

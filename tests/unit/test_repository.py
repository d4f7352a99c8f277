"""The repository itself: pins, sizes of files, and no rebinding of a library."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest


def _pins(root: Path) -> dict[str, str]:
    lines = (root / "launch" / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    for entry in entries:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+]+", entry), entry
    return dict(entry.lower().split("==") for entry in entries)


def test_every_dependency_is_pinned_by_name_and_version_only(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pins = _pins(root)
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        name = re.split(r"[\[<>=!~ ]", requirement)[0].lower()
        assert name in pins, f"{requirement} has no exact version in launch/constraints.txt"
    assert pins["megatron-core"].startswith("0.19.")
    assert pins["transformers"].startswith("5.")
    assert not any(name.startswith(("nvidia-", "triton")) for name in pins)


def test_apex_is_never_a_dependency(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    names = [re.split(r"[\[<>=!~ ]", line)[0] for line in listed]
    assert "apex" not in names
    assert {"te", "eval", "dev"} == set(extras)
    assert project["requires-python"] == ">=3.12"


def _sources(root: Path) -> list[Path]:
    folders = ("egmla_megatron", "tools", "launch", "tests")
    files = [file for folder in folders for file in (root / folder).rglob("*")]
    return [file for file in files if file.suffix in (".py", ".sh") and "__pycache__" not in file.parts]


def test_no_file_is_longer_than_300_lines(root: Path) -> None:
    package = [file for file in _sources(root) if "tests" not in file.relative_to(root).parts]
    long = {str(file): lines for file in package if (lines := len(file.read_text().splitlines())) > 300}
    assert not long


def _rebindings(source: str) -> list[str]:
    """Returns the places where a source assigns into a module, class or function imported from megatron."""
    tree = ast.parse(source)
    names = {"megatron"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.asname and alias.name.startswith("megatron")}

    def rooted(node: ast.expr) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return isinstance(node, ast.Name) and node.id in names

    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, (ast.Attribute, ast.Subscript))]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and isinstance(node.target, ast.Attribute):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            targets = node.args[:1]
        found += [f"line {node.lineno}: {ast.unparse(node)}" for target in targets if rooted(target)]  # type: ignore[attr-defined]
    return found


def test_no_source_rebinds_anything_of_megatron(root: Path) -> None:
    """Methods of the library are configured or subclassed, never replaced in place."""
    found = {str(file): _rebindings(file.read_text()) for file in _sources(root) if file.suffix == ".py"}
    assert not {file: places for file, places in found.items() if places}


@pytest.mark.parametrize(
    "source",
    [
        "from megatron.core import parallel_state as ps\nps.get_rank = None",
        "from megatron.core import (\n    utils,\n    tensor_parallel,\n)\ntensor_parallel.layers.f = 1",
        "import megatron.core\nmegatron.core.utils.x = 1",
        "from megatron.core.a import B\nsetattr(B, 'forward', f)",
    ],
)
def test_a_rebinding_would_be_seen(source: str) -> None:
    assert len(_rebindings(source)) == 1
    assert not _rebindings("from megatron.core import utils\nx = utils.f()\nself.utils = utils")

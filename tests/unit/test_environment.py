"""The environment: how common.sh finds Python, installs, locks and refuses; what the package may not contain."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# What common.sh may call; the sandbox's PATH holds these and nothing else.
_TOOLS = (
    "bash",
    "cat",
    "chmod",
    "cut",
    "dirname",
    "env",
    "flock",
    "grep",
    "kill",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sleep",
    "tail",
)

_FAKE_UV = """#!/bin/bash
# Stands in for uv: makes an environment whose python is this one, and counts its installations.
case "$1" in
    venv) target="${@: -1}"; mkdir -p "$target/bin"; echo > "$target/pyvenv.cfg"
          printf '#!/bin/bash\\nexec "%s" "$@"\\n' "$REAL_PYTHON" > "$target/bin/python"
          chmod +x "$target/bin/python" ;;
    pip) echo install >> "$COUNT"; sleep "${INSTALL_S:-0}"
         [ -z "${INSTALL_FAILS:-}" ] || { echo "$INSTALL_FAILS"; exit 1; } ;;
    *) exit 1 ;;
esac
"""


class Sandbox:
    """A copy of the repository's launch files with a PATH and a HOME of its own, in a path with a space."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.bin = folder / "bin"
        self.count = folder / "count"
        shutil.copytree(root / "launch", self.root / "launch")
        shutil.copy(root / "pyproject.toml", self.root)
        self.bin.mkdir()
        for tool in _TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        script = 'source "$(dirname "${BASH_SOURCE[0]}")/common.sh"\necho "$EGMLA_PY|$PWD|$(egmla_path x)"\n'
        (self.root / "launch" / "probe.sh").write_text(script)
        self.home = folder / "home"
        self.home.mkdir()

    def add(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def add_python(self) -> None:
        self.add("python3.12", f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')

    def start(self, **extra: str) -> subprocess.Popen[str]:
        variables = {"PATH": str(self.bin), "HOME": str(self.home), "COUNT": str(self.count)}
        variables |= {"REAL_PYTHON": sys.executable, **extra}
        return subprocess.Popen(
            [shutil.which("bash") or "bash", str(self.root / "launch" / "probe.sh")],
            cwd=self.home,
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, **extra: str) -> tuple[int, str, str]:
        process = self.start(**extra)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    @property
    def installations(self) -> int:
        return self.count.read_text().count("install") if self.count.exists() else 0

    @property
    def stamped(self) -> bool:
        return (self.root / ".venv" / "egmla_stamp").exists()


@pytest.fixture
def sandbox(root: Path, tmp_path: Path) -> Sandbox:
    return Sandbox(root, tmp_path)


def test_no_python_is_one_line(sandbox: Sandbox) -> None:
    if Path("/opt/conda/bin/python").exists():
        pytest.skip("this machine has a Python at a place that is always searched: /opt/conda")
    sandbox.add("python3.12", "#!/bin/bash\necho 'shim: command not found' >&2\nexit 127\n")
    sandbox.add("python3", "#!/bin/bash\nexit 1\n")
    code, out, err = sandbox.run()
    assert (code, out) == (2, "")
    assert err.startswith("error: no working Python >= 3.12")
    assert "EGMLA_PYTHON" in err
    assert err.count("\n") == 1


def test_a_broken_shim_is_passed_over(sandbox: Sandbox) -> None:
    sandbox.add("python3.12", "#!/bin/bash\nexit 127\n")
    sandbox.add("python3.13", f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    sandbox.add("uv", _FAKE_UV)
    code, out, err = sandbox.run()
    assert code == 0, err
    assert out == f"{sandbox.root}/.venv/bin/python|{sandbox.root}|{sandbox.home}/x\n"


def test_pyenv_version_is_found_without_a_shim(sandbox: Sandbox) -> None:
    folder = sandbox.home / ".pyenv" / "versions" / "3.12.9" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    sandbox.add("uv", _FAKE_UV)
    assert sandbox.run()[0] == 0


def test_a_wrong_egmla_python_is_named(sandbox: Sandbox) -> None:
    sandbox.add_python()
    code, _, err = sandbox.run(EGMLA_PYTHON="/nowhere/python")
    assert code == 2
    assert err.startswith("error: EGMLA_PYTHON: got /nowhere/python")
    assert err.count("\n") == 1


def test_second_run_installs_nothing_until_the_pins_change(sandbox: Sandbox) -> None:
    sandbox.add_python()
    sandbox.add("uv", _FAKE_UV)
    assert sandbox.run()[0] == 0
    started = time.monotonic()
    code, _, err = sandbox.run()
    assert (code, err) == (0, "")
    assert time.monotonic() - started < 5
    assert sandbox.installations == 1
    with (sandbox.root / "launch" / "constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    assert sandbox.run()[0] == 0
    assert sandbox.installations == 2
    assert sandbox.run(EGMLA_EXTRAS="dev,te")[0] == 0
    assert sandbox.installations == 3


def test_concurrent_runs_install_once(sandbox: Sandbox) -> None:
    sandbox.add_python()
    sandbox.add("uv", _FAKE_UV)
    processes = [sandbox.start(INSTALL_S="1") for _ in range(3)]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert sandbox.installations == 1


def test_concurrent_runs_without_flock(sandbox: Sandbox) -> None:
    (sandbox.bin / "flock").unlink(missing_ok=True)
    sandbox.add_python()
    sandbox.add("uv", _FAKE_UV)
    processes = [sandbox.start(INSTALL_S="1") for _ in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert sandbox.installations == 1
    assert not (sandbox.root / ".dev" / "install.lock.d").exists()


def test_an_interrupted_installation_is_done_again(sandbox: Sandbox) -> None:
    sandbox.add_python()
    sandbox.add("uv", _FAKE_UV)
    process = sandbox.start(INSTALL_S="30")
    deadline = time.monotonic() + 30
    while not sandbox.installations and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert not sandbox.stamped
    (sandbox.root / ".venv" / "half_written").touch()
    assert sandbox.run()[0] == 0
    assert sandbox.installations == 2
    assert sandbox.stamped
    assert not (sandbox.root / ".venv" / "half_written").exists()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("error: dns error: failed to lookup address", "error: packages cannot be fetched: the network"),
        ("ERROR: Because pytest-timeout==9 networkx no solution", "error: installation failed: ERROR: Because"),
    ],
)
def test_a_failed_installation_is_one_line(sandbox: Sandbox, message: str, expected: str) -> None:
    sandbox.add_python()
    sandbox.add("uv", _FAKE_UV.replace('exec "%s" "$@"', '[ "$1" != -m ] || exit 1; exec "%s" "$@"'))
    code, out, err = sandbox.run(INSTALL_FAILS=message)
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert (code, out) == (2, "")
    assert len(errors) == 1
    assert errors[0].startswith(expected)
    assert not sandbox.stamped


def test_a_foreign_folder_is_not_deleted(sandbox: Sandbox) -> None:
    sandbox.add_python()
    sandbox.add("uv", _FAKE_UV)
    precious = sandbox.home / "precious"
    precious.mkdir()
    (precious / "file").touch()
    code, _, err = sandbox.run(EGMLA_VENV="precious")
    assert code == 2
    assert "is no Python environment" in err
    assert (precious / "file").exists()


def test_none_uses_the_active_python_and_says_what_it_lacks(sandbox: Sandbox) -> None:
    sandbox.add_python()
    code, out, err = sandbox.run(EGMLA_VENV="none")
    assert code == 0, err
    assert out.startswith(f"{sandbox.bin}/python3.12|{sandbox.root}|")
    assert not (sandbox.root / ".venv").exists()
    sandbox.add("python3.12", f'#!/bin/bash\nexec "{sys.executable}" -S -E "$@"\n')
    code, _, err = sandbox.run(EGMLA_VENV="none")
    assert code == 2
    assert "lacks: torch" in err
    assert err.count("\n") == 1


def _script(sandbox: Sandbox, name: str, *arguments: str, **extra: str) -> tuple[int, str]:
    """(exit code, stderr) of a launch script whose Python only prints its arguments."""
    sandbox.add("python3.12", '#!/bin/bash\n[ "$1" = -c ] || printf "python %s\\n" "$*" >&2\n')
    sandbox.add("nvidia-smi", "#!/bin/bash\nexit 1\n")
    variables = {"PATH": str(sandbox.bin), "HOME": str(sandbox.home), "EGMLA_VENV": "none", **extra}
    command = [shutil.which("bash") or "bash", str(sandbox.root / "launch" / name), *arguments]
    done = subprocess.run(
        command, cwd=sandbox.home, env=variables, text=True, capture_output=True, check=False, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("script", ["train.sh", "quickstart.sh"])
@pytest.mark.parametrize("value", ["abc", "0", "-1", "1.5", "2 3", "08", "9" * 30])
def test_a_number_of_ranks_that_is_none_is_one_line(sandbox: Sandbox, script: str, value: str) -> None:
    code, err = _script(sandbox, script, "quickstart", EGMLA_NPROC=value)
    assert code == 2
    assert err.startswith(f"error: EGMLA_NPROC: got {value}, allowed a whole number from 1")
    assert err.count("\n") == 1


def test_the_number_of_ranks_reaches_the_launcher(sandbox: Sandbox) -> None:
    code, err = _script(sandbox, "train.sh", "mine.yaml", EGMLA_NPROC="12")
    assert code == 0
    assert "--nproc-per-node 12 -m egmla_megatron.train mine.yaml" in err
    assert "--nproc-per-node 1 " in _script(sandbox, "train.sh", "mine.yaml")[1]


@pytest.mark.parametrize("value", ["foo", "dev,foo", "dev te x", "[te]", "de"])
def test_an_unknown_extra_is_one_line(sandbox: Sandbox, value: str) -> None:
    code, err = _script(sandbox, "train.sh", "quickstart", EGMLA_EXTRAS=value)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: EGMLA_EXTRAS: got {value}, allowed dev, te, eval")


@pytest.mark.parametrize("arguments", [["--out"], ["--out", ""], ["--out="]])
def test_the_quickstart_wants_a_folder(sandbox: Sandbox, arguments: list[str]) -> None:
    code, err = _script(sandbox, "quickstart.sh", *arguments)
    assert (code, err) == (2, "error: --out: got nothing; give a folder\n")


def test_the_folder_of_the_quickstart_is_the_callers(sandbox: Sandbox) -> None:
    for arguments in (["--out", "mine"], ["--out=mine"]):
        code, err = _script(sandbox, "quickstart.sh", *arguments)
        assert code == 0
        assert f"--out {sandbox.home}/mine" in err

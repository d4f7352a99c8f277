"""Command lines: what argparse finds wrong is one line and exit code 2 too."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from egmla_megatron.cli import CommandParser
from egmla_megatron.errors import UserError
from egmla_megatron.inference.generate import Sampling

TOOLS = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "tools").glob("*.py"))


def call(
    program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    """(exit code, stdout, stderr) of a Python file, in this process."""
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(program, run_name="__main__")
    streams = capsys.readouterr()
    return caught.value.code, streams.out, streams.err


def programs(root: Path) -> list[str]:
    quickstart = root / "egmla_megatron" / "quickstart" / "__main__.py"
    return [*(str(root / "tools" / f"{name}.py") for name in TOOLS), str(quickstart)]


@pytest.mark.parametrize("number", range(len(TOOLS) + 1), ids=[*TOOLS, "quickstart"])
@pytest.mark.parametrize("arguments", [["--nonsense"], ["--nonsense", "--help-me", "x"]])
def test_a_wrong_option_is_one_line(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    arguments: list[str],
) -> None:
    code, out, err = call(programs(root)[number], arguments, monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: command line: ") and err.endswith("; see --help\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("plan", [], "got no CONFIG, allowed a YAML file"),
        ("plan", ["quickstart", "--world-size", "two"], "argument --gpus/--world-size: invalid int value: 'two'"),
        ("plan", ["quickstart", "--world", "2"], "unrecognized arguments: --world"),  # no guessing
        ("convert_checkpoint", [], "the following arguments are required: command"),
        ("convert_checkpoint", ["to-hf", "a"], "the following arguments are required: dst"),
        ("convert_checkpoint", ["to-hf", "a", "b", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        ("generate", ["hf"], "one of the arguments --prompt --prompts-file is required"),
        ("report", ["--out"], "argument --out: expected one argument"),
    ],
)
def test_what_is_wrong_is_said(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tool: str,
    arguments: list[str],
    message: str,
) -> None:
    code, _, err = call(str(root / "tools" / f"{tool}.py"), arguments, monkeypatch, capsys)
    assert code == 2
    assert err.startswith(f"error: command line: {message}") and err.count("\n") == 1


def test_help_is_still_help(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(str(root / "tools" / "plan.py"), ["--help"], monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: ")


def test_a_parser_raises_and_does_not_exit() -> None:
    with pytest.raises(UserError, match="command line: unrecognized arguments: --x; see --help"):
        CommandParser().parse_args(["--x"])


def test_verify_data_wants_the_prefix(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(str(root / "tools" / "verify_data.py"), [f"{tmp_path}/mine.bin"], monkeypatch, capsys)
    assert code == 2
    assert err == (
        f"error: PREFIX: got {tmp_path}/mine.bin, allowed the prefix of a data set, without .bin and .idx; "
        f"drop the suffix: {tmp_path}/mine\n"
    )


@pytest.mark.parametrize("temperature", ["nan", "-1", "-inf"])
def test_generate_refuses_an_impossible_temperature(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    arguments = ["nowhere", "--prompt", "a", f"--temperature={temperature}"]
    code, _, err = call(str(root / "tools" / "generate.py"), arguments, monkeypatch, capsys)
    assert code == 2
    allowed = "allowed 0 (most likely token), or 0.0001 to 10000"
    assert err == f"error: temperature: got {float(temperature)}, {allowed}\n"


@pytest.mark.parametrize(("option", "value"), [("top_p", float("nan")), ("top_p", 0.0), ("max_new_tokens", 0)])
def test_impossible_sampling_is_refused(option: str, value: float) -> None:
    with pytest.raises(UserError, match=f"^{option}: got "):
        Sampling(**{option: value}).check()  # type: ignore[arg-type]

"""Every number of the configuration with values that are none of its own: refused in one line, or taken."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.config.ranges import _LARGEST
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.train.main import main
from tests.dist.harness import start_trainer
from tests.tiny import tiny_run, write_run

VALUES = ("1e38", "inf", "-inf", "nan", "-1", "0", f"{10**30}", "1e400", "1" + "0" * 5000, "1e-320", "2147483647")
LISTS = ("profile.steps", "profile.ranks")


def numbers() -> dict[str, Any]:
    """section.key -> default."""
    found = {}
    for section in dataclasses.fields(RunConfig):
        default = getattr(RunConfig(), section.name)
        for field in dataclasses.fields(default):
            value = getattr(default, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[f"{section.name}.{field.name}"] = value
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("numbers"), "run")[0]


def _outcome(config: Path, override: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Exit code of a check. Anything but a UserError comes out of `main` as it is."""
    capsys.readouterr()
    code = main([str(config), override, "--check"])
    streams = capsys.readouterr()
    if code == 2:
        assert streams.err.startswith("error: ") and streams.err.count("\n") == 1, (override, streams.err)
        name = override.partition("=")[0]
        related = name.rpartition(".")[2] in streams.err or name.partition(".")[0] in streams.err
        assert related and "Exceeds" not in streams.err, (override, streams.err)
    else:
        assert code == 0 and streams.out.startswith("ok"), (override, streams)
    return code


@pytest.mark.parametrize("name", [*numbers(), *LISTS])
def test_a_check_refuses_or_takes_it(config: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    codes = {value: _outcome(config, f"{name}={value}", capsys) for value in VALUES}
    assert all(codes[value] == 2 for value in ("inf", "-inf", "nan", f"{10**30}", "1e38", "1e400")), codes


@pytest.mark.parametrize("name", [name for name, default in numbers().items() if isinstance(default, float)])
def test_every_fractional_number_has_an_upper_limit(name: str) -> None:
    section, key = name.split(".")
    cfg = tiny_run()
    for value in (3.0e38, float("inf"), float("nan")):
        changed = dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **{key: value})})
        with pytest.raises(UserError, match=rf"^{name}: got "):
            check_config(changed, 1)


def test_the_largest_of_the_optimizer_together_are_no_traceback(tmp_path: Path) -> None:
    """They only make the weights useless: products of them fit into 32 bits."""
    config, _ = write_run(tmp_path, "run", train={"steps": 3}, optimizer={"warmup_steps": 0})
    names = ("lr", "eps", "weight_decay", "clip_grad", "gate_table_lr_ratio")
    settings = [f"optimizer.{name}={_LARGEST[f'optimizer.{name}']}" for name in names]
    job = start_trainer(1, tmp_path / "log", config, *settings)
    assert job.wait() == 0 and "Traceback" not in job.output, job.output


def test_every_whole_number_has_an_upper_limit() -> None:
    """A newcomer's setting too: what the libraries cannot hold would be a traceback."""
    cfg = load_config("pretrain_base")
    sections = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    names = [
        f"{section}.{key}"
        for section, values in sections.items()
        for key, value in dataclasses.asdict(values).items()
        if isinstance(value, int) and not isinstance(value, bool)
    ]
    assert len(names) > 30
    for name in names:
        with pytest.raises(UserError, match=rf"{name}: got 1{'0' * 30}; allowed: at most \d+"):
            check_config(load_config("pretrain_base", [f"{name}=1{'0' * 30}"]), 1)

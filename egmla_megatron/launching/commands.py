"""The steps of a job as subcommands: each decides one thing, says it, and hands it to the script by exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from egmla_megatron.checkpoint.choose import choose_checkpoint, warn_of_damaged
from egmla_megatron.checkpoint.manifest import read_manifest, step_of
from egmla_megatron.cli import CommandParser
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.launching.fit import fit_to_nodes
from egmla_megatron.launching.last_words import last_words, size_of
from egmla_megatron.launching.ledger import Launch, read_launches, read_tail, record_end, record_start
from egmla_megatron.launching.nodes import check_nodes
from egmla_megatron.launching.status import format_status, read_status
from egmla_megatron.launching.verdict import close_launch, judge
from egmla_megatron.train.lock import lock_run_dir
from egmla_megatron.train.preflight import check_everything
from egmla_megatron.train.run_dir import write_config

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m egmla_megatron.launching COMMAND ...`; returns the exit code.

    Raises:
        UserError: what the user can mend.
    """
    parser = CommandParser(prog="python -m egmla_megatron.launching", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    for name, (action, about) in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(action=action)
        if name == "status":
            command.add_argument("run_dir", metavar="RUN_DIR")
            command.add_argument("--json", action="store_true", help="one JSON object")
            continue
        command.add_argument("--nodes", required=True, type=str.split, help="names, the first one leads")
        command.add_argument("--ranks", required=True, type=int, help="ranks of each node")
        command.add_argument("--job", default="", help="Slurm's job id")
        command.add_argument("--restart", default=0, type=int, help="how often Slurm restarted it")
        command.add_argument("--port", default=0, type=int, help="of the first node")
        command.add_argument("--log", default="", help="file with the job's stderr")
        command.add_argument("--code", default=0, type=int, help="exit code of the step that ended")
        command.add_argument("--signal", default=0, type=int, help="signal that the script got")
        command.add_argument("--checks", action="store_true", help="the step was a check, not the training")
        command.add_argument("config")
        command.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args(argv)
    code: int = arguments.action(arguments)
    return code


def _config(arguments: argparse.Namespace, *, gpu: bool | None = None) -> RunConfig:
    """`gpu` as in `load_config`; False where nothing depends on it, so that no driver is asked: on a node that is
    looked at, or whose run has crashed, it may hang."""
    return load_config(arguments.config, arguments.overrides, gpu=gpu)


def _fit(arguments: argparse.Namespace) -> int:
    """Prints the overrides that make the configuration fit, in one line; notes go to stderr."""
    nodes = len(arguments.nodes)
    fit = fit_to_nodes(_config(arguments), nodes, arguments.ranks)
    os.environ.update(LOCAL_WORLD_SIZE=str(arguments.ranks), LOCAL_RANK="0")
    layout, checkpoint = check_everything(fit.cfg, nodes * arguments.ranks)
    warn_of_damaged(fit.cfg)
    if checkpoint is not None:
        before = read_manifest(checkpoint).layout
        if before["world_size"] != layout.world_size:
            print(
                f"resuming step {step_of(checkpoint)} of {before['world_size']} ranks on {layout.world_size}; the "
                f"global batch stays {fit.cfg.train.global_batch_size} sequences",
                file=sys.stderr,
            )
    for note in fit.notes:
        print(f"adapted: {note}", file=sys.stderr)
    print(" ".join(fit.overrides))
    return 0


def _nodes(arguments: argparse.Namespace) -> int:
    os.environ.update(LOCAL_WORLD_SIZE=str(arguments.ranks))
    token = f".egmla_nodes_{arguments.job}_{arguments.restart}"
    return check_nodes(_config(arguments, gpu=False), arguments.nodes, arguments.port, token)


def _begin(arguments: argparse.Namespace) -> int:
    """Claims the run folder, closes what an earlier launch left open, and records this one."""
    cfg = _config(arguments, gpu=False)
    folder = Path(cfg.run.dir)
    if not (folder / "config.yaml").is_file():
        write_config(_config(arguments))
    lock_run_dir(folder).close()  # another job there is found now, not after the start of all ranks
    tail, launches = read_tail(folder), read_launches(folder)
    if launches and launches[-1].is_open:
        lost = close_launch(launches[-1], 1, 0, tail, "")
        record_end(folder, replace(lost, outcome="lost", said="it ended without a word: a node or the job was killed"))
    checkpoint = choose_checkpoint(cfg)
    launch = Launch(
        job=arguments.job,
        restart=arguments.restart,
        nodes=tuple(arguments.nodes),
        ranks=len(arguments.nodes) * arguments.ranks,
        started_unix_s=time.time(),
        from_step=0 if checkpoint is None else read_manifest(checkpoint).step,
        log_bytes=size_of(arguments.log),
    )
    record_start(folder, launch)
    return 0


def _end(arguments: argparse.Namespace) -> int:
    """Records how the launch ended; the exit code says what the script does now (see verdict.py)."""
    folder = Path(_config(arguments, gpu=False).run.dir)
    launches = read_launches(folder)
    mine = [launch for launch in launches if (launch.job, launch.restart) == (arguments.job, arguments.restart)]
    last = mine[-1]  # not the last of all: another job may have come and been refused meanwhile
    said = last_words(arguments.log, last.log_bytes) if arguments.code else ""
    last = close_launch(last, arguments.code, arguments.signal, read_tail(folder), said, checks=arguments.checks)
    record_end(folder, last)
    before = [launch for launch in launches[: launches.index(mine[-1])] if not launch.is_open]
    verdict = judge([*before, last])
    print(f"launcher: {verdict.sentence}", file=sys.stderr, flush=True)
    return verdict.code


def _status(arguments: argparse.Namespace) -> int:
    status = read_status(arguments.run_dir)
    print(json.dumps(status) if arguments.json else format_status(status))
    return 0


_COMMANDS = {
    "fit": (_fit, "check everything and print the overrides that make a configuration fit the nodes"),
    "nodes": (_nodes, "compare the nodes, on each of them"),
    "begin": (_begin, "record the start of a launch"),
    "end": (_end, "record its end; exit code 0: done, 75: start again, else stop"),
    "status": (_status, "how a run stands"),
}

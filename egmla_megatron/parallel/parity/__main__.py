"""`python -m egmla_megatron.parallel.parity [--ranks N ...] [--only PATTERN] [--json FILE]`

Proves on this machine's CPU, over gloo, that every supported layout is the same training as one rank: loss, every
gradient, the reported gradient norm, and the weights after five steps, in fp32. Prints a table; exit code 1 when a
layout is not. With all cases about three minutes on two cores.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.errors import UserError
from egmla_megatron.parallel.parity.cases import RANKS, all_cases
from egmla_megatron.parallel.parity.table import format_table

WORKER = "egmla_megatron.parallel.parity.worker"
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _start(ranks: int, folder: Path, pattern: str) -> dict[str, list[dict[str, Any]]]:
    """Run the cases of one number of ranks; case -> errors of every rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = folder / f"ranks{ranks}.log"
    with log.open("wb") as stream:
        command = [sys.executable, "-W", "ignore", *launcher, "-m", WORKER, str(folder), pattern]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )
    if done.returncode:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-6000:])
        raise RuntimeError(f"the job of {ranks} ranks ended with exit code {done.returncode}")
    found = [json.loads((folder / f"ranks{ranks}_{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return {name: [errors[name] for errors in found] for name in found[0]}


def prove(ranks: tuple[int, ...], pattern: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Case -> errors of every rank. The serial references are always trained first.

    Raises:
        RuntimeError: a job failed; its output is on stderr.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for size in (1, *(size for size in ranks if size > 1)):
        matching = [case.name for case in all_cases(size) if fnmatch.fnmatch(case.name, pattern)]
        if size > 1 and not matching:
            continue
        print(f"training on {size} rank{'s' if size > 1 else ''}", file=sys.stderr, flush=True)
        errors = _start(size, folder, pattern)
        found |= errors if size in ranks else {}
    return found


def main() -> int:
    """The command; returns the exit code."""
    parser = CommandParser(
        prog="python -m egmla_megatron.parallel.parity", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), choices=RANKS, help="default: 1 2 4")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases to run, as in 'mul-tp2*'")
    parser.add_argument("--json", metavar="FILE", help="write every rank's errors")
    options = parser.parse_args()
    names = [case.name for size in options.ranks for case in all_cases(size) if case.layout != "serial"]
    if not fnmatch.filter(names, options.only):
        raise UserError(f"--only: got {options.only}, allowed patterns of {len(names)} cases, such as {names[0]}")
    with tempfile.TemporaryDirectory(prefix="egmla-parity-") as folder:
        found = prove(tuple(options.ranks), options.only, Path(folder))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    table, passed = format_table(found)
    print(table)
    return 0 if passed else 1


if __name__ == "__main__":
    run_main(main)

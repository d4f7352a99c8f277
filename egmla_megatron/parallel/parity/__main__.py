"""`python -m egmla_megatron.parallel.parity [--ranks N ...] [--only PATTERNS] [--gpus] [--json FILE]`

Proves on this machine's CPU, over gloo, that every supported layout is the same training as one rank: loss, every
gradient, the reported gradient norm, and the weights after five steps, in fp32. Prints a table; exit code 1 when a
layout is not. With all cases ten minutes on two cores, most of it on four ranks. `--gpus` proves the same on GPUs.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.errors import UserError
from egmla_megatron.folders import refuse_unwritable_file
from egmla_megatron.parallel.child_processes import end_with
from egmla_megatron.parallel.parity.cases import RANKS, all_cases, matching_cases
from egmla_megatron.parallel.parity.table import crash_name, format_table

WORKER = "egmla_megatron.parallel.parity.worker"
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _run_ranks(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Exit code of a job in a process group of its own, which ends with this command."""
    with log.open("wb") as stream:
        job = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(end_with, os.getpid()),
        )
    try:
        return job.wait()
    finally:
        if job.poll() is None:
            job.terminate()  # torchrun ends its ranks, which have process groups of their own
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)


def _start(ranks: int, folder: Path, pattern: str, *, gpus: bool) -> dict[str, list[dict[str, Any]]]:
    """Run the cases of one number of ranks; case -> errors of every rank that came so far."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    environment |= {"OMP_NUM_THREADS": "1"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    if environment.pop("PYTHONDONTWRITEBYTECODE", ""):  # every rank would compile megatron-core: 20 s of CPU each
        environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    log = folder / f"ranks{ranks}.log"
    code = _run_ranks([sys.executable, "-W", "ignore", *launcher, "-m", WORKER, str(folder), pattern], environment, log)
    if code:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-6000:])
        print(f"the job of {ranks} ranks ended with exit code {code}; its output is above", file=sys.stderr)
    files = [folder / f"ranks{ranks}_{rank}.json" for rank in range(ranks)]
    found = [json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for file in files]
    results = {name: [errors[name] for errors in found if name in errors] for name in found[0]}
    return results | ({crash_name(ranks): [{"drifted": [], "crashed": code}]} if code else {})


def prove(ranks: tuple[int, ...], pattern: str, folder: Path, *, gpus: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Case -> errors of every rank, as far as they came. The serial references are always trained first.

    gpus: one for each rank, instead of CPU processes.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for size in (1, *(size for size in ranks if size > 1)):
        if size > 1 and not matching_cases(size, pattern):
            continue
        print(f"training on {size} rank{'s' if size > 1 else ''}", file=sys.stderr, flush=True)
        errors = _start(size, folder, pattern, gpus=gpus)
        found |= errors if size in ranks else {name: each for name, each in errors.items() if name == crash_name(1)}
        if crash_name(size) in errors:
            break
    return found


def _end(number: int, frame: Any) -> None:
    """SIGTERM unwinds like Ctrl-C: the ranks and the folder go along."""
    raise SystemExit(128 + number)


def main() -> int:
    """The command; returns the exit code."""
    parser = CommandParser(
        prog="python -m egmla_megatron.parallel.parity", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), choices=RANKS, help="default: 1 2 4")
    parser.add_argument("--only", default="*", metavar="PATTERNS", help="cases to run, as in 'mul-tp2*,deep-cp4'")
    parser.add_argument("--gpus", action="store_true", help="on GPUs, one for each rank, instead of CPU processes")
    parser.add_argument("--json", metavar="FILE", help="write every rank's errors")
    options = parser.parse_args()
    names = [case.name for size in options.ranks for case in all_cases(size) if case.layout != "serial"]
    if not any(matching_cases(size, options.only) for size in options.ranks):
        raise UserError(f"--only: got {options.only}, allowed patterns of {len(names)} cases, such as {names[0]}")
    report = Path(options.json) if options.json else None
    if report:
        refuse_unwritable_file("--json", report)
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="egmla-parity-") as folder:
        found = prove(tuple(options.ranks), options.only, Path(folder), gpus=options.gpus)
    table, passed = format_table(found)
    print(table, flush=True)
    if report:
        report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    run_main(main)

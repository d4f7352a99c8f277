"""`torchrun ... -m egmla_megatron.train CONFIG [section.key=value ...]`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from egmla_megatron.environment import whole_number
from egmla_megatron.errors import UserError
from egmla_megatron.quiet import quiet_libraries
from egmla_megatron.train.leave import leave

__all__ = ["main"]

ALONE_AFTER_S = 8.0  # seconds in which the launcher surely has ended a rank that did not fail alone

USAGE = """usage: python -m egmla_megatron.train CONFIG [section.key=value ...] [--check]

CONFIG    a YAML file, or the name of one in configs/run
settings  section.key=value, as many as wanted or none
--check   only check configuration, data, run folder and checkpoint (for WORLD_SIZE ranks), start nothing

One process per GPU (or CPU rank) through torchrun; alone it is a run of one rank."""


def _train(arguments: Sequence[str], *, check_only: bool) -> int:
    from egmla_megatron.checkpoint.choose import warn_of_damaged
    from egmla_megatron.config.load import load_config
    from egmla_megatron.train.preflight import check_everything
    from egmla_megatron.train.resume import nothing_to_train

    cfg = load_config(arguments[0], arguments[1:])
    rank, world_size = whole_number("RANK", 0, 0), whole_number("WORLD_SIZE", 1, 1)
    layout, checkpoint = check_everything(cfg, world_size)
    if check_only:
        if rank == 0:
            warn_of_damaged(cfg)
            begins = f"resumes {checkpoint}" if checkpoint else "starts from the beginning"
            print(f"ok: {layout.summary()}; {nothing_to_train(cfg, checkpoint) or begins}")
        return 0
    from egmla_megatron.train.session import train

    return train(cfg, layout)


def _report(error: UserError) -> None:
    """One line per node. Ranks usually fail together: the others wait for the first to speak, and end with it
    when the launcher ends them; a rank that is still there after that failed alone and speaks for itself."""
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    where = "" if rank == "0" else f"{socket.gethostname()}, rank {rank}: "
    if local_rank != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(ALONE_AFTER_S)
    print(f"error: {where}" + " ".join(str(error).split()), file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 a peer or this rank failed, 2 the user's mistake, 128+n signal n."""
    arguments = [argument for argument in argv if not argument.startswith("-")]
    flags = {argument for argument in argv if argument.startswith("-")}
    if flags & {"-h", "--help"}:
        print(USAGE)
        return 0
    quiet_libraries()
    return leave(_outcome(arguments, flags))


def _outcome(arguments: Sequence[str], flags: set[str]) -> int:
    try:
        unknown = flags - {"--check"}
        if unknown or not arguments:
            got = f"the unknown option {sorted(unknown)[0]}" if unknown else "no CONFIG"
            raise UserError(
                f"command line: got {got}; usage: python -m egmla_megatron.train CONFIG [section.key=value ...] "
                "[--check]; settings may be left out"
            )
        return _train(arguments, check_only="--check" in flags)
    except UserError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT

"""`torchrun ... -m egmla_megatron.train CONFIG [section.key=value ...]`."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from collections.abc import Sequence

from egmla_megatron.errors import UserError

__all__ = ["main", "quiet_libraries"]

USAGE = """usage: python -m egmla_megatron.train CONFIG [section.key=value ...] [--check]

CONFIG    a YAML file, or the name of one in configs/run
--check   only check configuration, data, run folder and checkpoint (for WORLD_SIZE ranks), start nothing

One process per GPU (or CPU rank) through torchrun; alone it is a run of one rank."""


def quiet_libraries() -> None:
    """Drop what megatron-core and torch say at every start about options this project does not use."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|torch)\..*")
    warnings.filterwarnings(
        "ignore", category=UserWarning, message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r"megatron\..*")
    for name in ("megatron", "torch.distributed.elastic", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _train(arguments: Sequence[str], *, check_only: bool) -> int:
    from egmla_megatron.config.load import load_config

    cfg = load_config(arguments[0], arguments[1:])
    from egmla_megatron.config.check import check_config

    check_config(cfg, int(os.environ.get("WORLD_SIZE", "1")))  # before torch is even imported
    from egmla_megatron.train.session import check_only as check
    from egmla_megatron.train.session import train

    return check(cfg) if check_only else train(cfg)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 a peer or this rank failed, 2 the user's mistake, 128+n signal n."""
    arguments = [argument for argument in argv if not argument.startswith("-")]
    flags = {argument for argument in argv if argument.startswith("-")}
    if flags & {"-h", "--help"}:
        print(USAGE)
        return 0
    quiet_libraries()
    try:
        unknown = flags - {"--check"}
        if unknown or not arguments:
            got = f"unknown option {sorted(unknown)[0]}" if unknown else "no CONFIG"
            raise UserError(
                f"command line: {got}; usage: python -m egmla_megatron.train CONFIG [section.key=value ...]"
            )
        return _train(arguments, check_only="--check" in flags)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per node, not once per rank
            where = f"{socket.gethostname()}: " if os.environ.get("RANK", "0") != "0" else ""
            print(f"error: {where}" + " ".join(str(error).split()), file=sys.stderr, flush=True)
        return 2

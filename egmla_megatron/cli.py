"""What every command line has in common: how it ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from egmla_megatron.errors import UserError

__all__ = ["CommandParser", "run_main"]

_USER_MISTAKE = 2
_INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose complaints are mistakes of the user like any other: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see --help")


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and exits with its return value (None: 0).

    UserError becomes one line `error: ...` on stderr and exit code 2, Ctrl-C exit code 130, a reader that
    went away (`| head`) a quiet end. Anything else is a bug and keeps its traceback.
    """
    try:
        code = main() or 0
        sys.stdout.flush()  # a closed pipe shows here, not in the interpreter's shutdown
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        code = _USER_MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)

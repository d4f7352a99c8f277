"""What every command line has in common: how it is read, and how it ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from egmla_megatron.errors import UserError

__all__ = ["CommandParser", "check_count", "run_main"]

_INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is one line like every other mistake's, and that guesses no option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Words of which there may be none are not asked for where others are missing."""
        if options.get("nargs") == "*":
            options.setdefault("default", [])
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see --help")


def check_count(option: str, value: int | None, least: int, most: int) -> None:
    """Raises UserError for a number given with `option` that is none of least to most; None: not given."""
    if value is not None and not least <= value <= most:
        raise UserError(
            f"{option}: got {value}, allowed a whole number from {least} to {most}; give one, or leave the option out"
        )


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and exits with its return value (None: 0).

    UserError becomes one line `error: ...` on stderr and its exit code, Ctrl-C exit code 130, a reader that
    went away (`| head`) a quiet end. Anything else is a bug and keeps its traceback.
    """
    try:
        code = main() or 0
        sys.stdout.flush()  # a closed pipe shows here, not in the interpreter's shutdown
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)

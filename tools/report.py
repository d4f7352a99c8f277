"""Writes the report of a run beside its metrics, or a comparison of several runs.

    python tools/report.py RUN_DIR                          RUN_DIR/report.md with plots, report.html
    python tools/report.py RUN_DIR RUN_DIR ... [--out DIR]  those, and DIR/comparison.md with plots, comparison.html

Prints the path of what it wrote last. Exit code 2 on a user's mistake.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.report.write import write_comparison, write_report


def main() -> None:
    parser = CommandParser(description="Report of a run, or comparison of several.")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--out",
        help="folder of what is written: of one run its report (default: the run's folder), of several the comparison "
        "alone (default: the folder that holds the first run, and each run's report in its own)",
    )
    arguments = parser.parse_args()
    if len(arguments.run_dirs) == 1:
        written = write_report(arguments.run_dirs[0], arguments.out)
    else:
        if not arguments.out:
            for run_dir in arguments.run_dirs:
                write_report(run_dir)
        out = arguments.out or Path(arguments.run_dirs[0]).resolve().parent
        written = write_comparison(arguments.run_dirs, out)
    print(written)


if __name__ == "__main__":
    run_main(main)

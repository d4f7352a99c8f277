"""Builds the sample indices of one split in this process alone: `python -m ... YAML_TEXT SPLIT FOLDER`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from egmla_megatron.cli import run_main
from egmla_megatron.config.load import load_config
from egmla_megatron.data.dataset import build_split


def main() -> None:
    text, split, folder = sys.argv[1:]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        cfg = load_config(stream.name)
    build_split(cfg, int(split), Path(folder))


if __name__ == "__main__":
    run_main(main)

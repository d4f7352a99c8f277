"""Prompts from the command line or a file."""

from __future__ import annotations

import json
from pathlib import Path

from egmla_megatron.errors import UserError

__all__ = ["read_prompts"]


def read_prompts(path: str | Path) -> list[str]:
    """Prompts of a file: .jsonl has one JSON text or object with `prompt` a line, any other file one text a line.

    Empty lines are passed over.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts-file: {path} cannot be read ({error}); give a text file in UTF-8") from error
    lines = [line.removesuffix("\r") for line in lines]
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_parsed(path, number, line) for number, line in numbered]
    else:
        prompts = [line for _, line in numbered]
    if not prompts:
        raise UserError(f"prompts-file: {path} holds no prompt; write one a line")
    return prompts


def _parsed(path: Path, number: int, line: str) -> str:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise UserError(f"prompts-file: {path} line {number}: not JSON ({error})") from error
    prompt = content.get("prompt") if isinstance(content, dict) else content
    if not isinstance(prompt, str):
        raise UserError(f"prompts-file: {path} line {number}: got {line[:60]}, allowed a text or an object with prompt")
    return prompt

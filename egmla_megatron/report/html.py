"""A Markdown report as one HTML file that needs no other file, and prints well."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

import markdown

__all__ = ["to_html"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ccc; padding: .25em .8em; text-align: left; vertical-align: top }
th { border-bottom: 2px solid #666 }
img { max-width: 100%; height: auto }
.table { overflow-x: auto }
@media print { body { margin: 0; max-width: none; font-size: 10pt } img, table { break-inside: avoid }
  .table { overflow: visible } h2 { break-after: avoid } }
"""


def to_html(text: str, folder: Path, title: str) -> str:
    """`text` in Markdown -> a page. Pictures that it names in `folder` become part of it."""
    body = markdown.markdown(text, extensions=["tables"])
    body = re.sub(r'src="([^":]+\.png)"', lambda found: f'src="{_data(folder / html.unescape(found[1]))}"', body)
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _data(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"

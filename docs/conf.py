"""The site of the documentation: `make site` writes it to build/site, by Sphinx."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
project = "layoutopt"
extensions = ["myst_parser"]
root_doc = "README"
myst_heading_anchors = 4
highlight_language = "text"
# What a command prints is no shell: the lexer fails on lines that begin with "%" or hold an apostrophe.
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_title = "layoutopt"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
"""A link to a file: its text, path and anchor."""


def contents(index: str) -> str:
    """Tables of contents of the index: one per heading, of the pages that its table names."""
    parts = re.split(r"^## ", index, flags=re.MULTILINE)[1:]
    found = ((part.split("\n", 1)[0], [path for _, path, _ in LINK.findall(part)]) for part in parts)
    return "".join(
        "\n```{toctree}\n:hidden:\n:caption: " + head + "\n\n" + "\n".join(pages) + "\n```\n"
        for head, names in found
        if (pages := [name for name in names if not name.startswith("..")])
    )


def of_site(name: str, text: str) -> str:
    """A page as the site has it: files outside of docs are named, not linked; the index has contents."""
    folder = (HERE / name).parent

    def link(found: re.Match[str]) -> str:
        inside = (folder / found[2]).resolve().is_relative_to(HERE)
        return found[0] if inside else found[1]

    whole = LINK.sub(link, text)
    return whole + contents(text) if name == root_doc else whole


def setup(app: Any) -> None:
    """Called by Sphinx."""

    def read(_: Any, name: str, source: list[str]) -> None:
        source[0] = of_site(name, source[0])

    app.connect("source-read", read)

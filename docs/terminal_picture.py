"""A picture of a terminal: what a command printed, coloured as it was, as SVG.

    FORCE_COLOR=1 COLUMNS=118 layoutopt search … > out.ansi
    python docs/terminal_picture.py "layoutopt search …" < out.ansi > picture.svg

Nothing is retouched; output is shown up to the end of its first table.
"""

from __future__ import annotations

import io
import re
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 118
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)


def picture(command: str, output: str) -> str:
    """The SVG; fonts are the reader's own, nothing is loaded."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"), "", sep="\n")
    summary, _, rest = output.partition("\n\n")
    table = rest.partition("\n\n")[0]
    console.print(Text.from_ansi(f"{summary}\n\n{table}"))
    return FONTS.sub("", console.export_svg(title="layoutopt"))


if __name__ == "__main__":
    sys.stdout.write(picture(sys.argv[1], sys.stdin.read()))

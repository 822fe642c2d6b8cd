"""Writes the generated pages of the documentation.

    .venv/bin/python -m benchmarks.pages [PAGE ...]

Without a page, all of them.
"""

from __future__ import annotations

import sys

from benchmarks.pages.listed import PAGES, written
from benchmarks.pages.tables import ROOT


def main() -> None:
    for path in sys.argv[1:] or PAGES:
        (ROOT / path).write_text(written(path), encoding="utf-8")


if __name__ == "__main__":
    main()

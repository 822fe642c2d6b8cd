"""Writes the generated pages of the documentation.

    .venv/bin/python -m benchmarks.pages [PAGE ...]

Without a page, all of them.
"""

from __future__ import annotations

import argparse

from benchmarks.pages.listed import PAGES, written
from benchmarks.pages.tables import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", nargs="*", choices=[[], *PAGES], metavar="PAGE", help=", ".join(PAGES))
    for path in parser.parse_args().page or PAGES:
        (ROOT / path).write_text(written(path), encoding="utf-8")


if __name__ == "__main__":
    main()

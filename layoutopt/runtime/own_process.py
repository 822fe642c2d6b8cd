"""Starts Python processes that import nothing from the current folder, which may contain untrusted files."""

from __future__ import annotations

import sys
from pathlib import Path

_START = """
import importlib
import sys
sys.path.insert(0, sys.argv[1])
importlib.import_module(sys.argv[2]).main()
"""


def command(module: str) -> list[str]:
    """The command that runs `main` of one of our modules; `python -m` would look into the current folder
    first."""
    return [sys.executable, "-P", "-c", _START, str(Path(__file__).parents[2]), module]

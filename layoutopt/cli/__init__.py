"""The command line, `layoutopt`: one module per command, which imports others when it is called."""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False  # typing's own takes longer to import than everything else here
if TYPE_CHECKING:
    from typing import Any

    from layoutopt.cli.application import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    """Loads typer when a command is wanted: help does without."""
    if name != "app":
        raise AttributeError(f"module 'layoutopt.cli' has no attribute {name!r}")
    from layoutopt.cli.application import app

    return app


YOUNG, OLDER = 10_000_000, (50, 1000)
"""Thresholds of the garbage collector: a search creates many objects and drops few, and repeated collections
took a fifth of its time. The process is the command's own."""


def main() -> None:
    """Entry point of the console script."""
    from layoutopt.cli.streams import open_streams

    gc.set_threshold(YOUNG, *OLDER)
    try:
        with open_streams():
            if sys.argv[1:] == ["--help"]:
                from layoutopt.cli.exits import handled
                from layoutopt.cli.listing import show_help

                with handled(sys.argv[1:]):
                    show_help()
                    sys.stdout.flush()
            else:
                from layoutopt.cli.application import app

                app(prog_name="layoutopt")
    finally:
        # All that is left goes with the process: nothing to collect from it.
        gc.freeze()

"""The way in, of `layoutopt` and of `python -m layoutopt`: signals are heard before anything takes time."""

from __future__ import annotations

from layoutopt import signals


def main() -> None:
    """Entry point of the console script."""
    signals.start()
    from layoutopt.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()

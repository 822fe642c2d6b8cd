"""`python -m layoutopt`: the command line, for environments whose scripts are not on the path."""

from __future__ import annotations

from layoutopt.cli import main

if __name__ == "__main__":
    main()

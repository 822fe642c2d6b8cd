"""How `layoutopt launch` starts a worker: the command line, in a process that does not outlive its launcher.

    python -m layoutopt.cli.worker LEASH train MODEL ...

LEASH is a pipe whose other end only the launcher holds; it is closed when the launcher ends for any reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
"""Linux's prctl: the signal that a process gets when its parent ends, even if it is stopped."""


def hold(leash: int) -> None:
    """Ends this process and those that it started when the launcher is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(leash, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="leash", daemon=True).start()


def main() -> None:
    """Runs the command line behind the leash."""
    hold(int(sys.argv.pop(1)))
    sys.argv[0] = "layoutopt"
    from layoutopt.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()

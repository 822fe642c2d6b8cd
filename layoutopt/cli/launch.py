"""`layoutopt launch`: a command as several local worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layoutopt.cli.terminal import Terminal

AGAIN = "run the same command again"
AFTER_FAILURE = {
    "train": "add --checkpoint DIR to resume after a failure",
    "calibrate": "run the same command again to continue from the saved measurements",
    "measure": AGAIN,
    "validate": AGAIN,
    "generate": AGAIN,
}
"""The commands that can be run, and the message if one failed and is not started again."""
TOGETHER = ", ".join(AFTER_FAILURE)
OWN = ("--coordinator", "--processes", "--process")
"""Options of the command that launch gives its workers, each its own: of all the same, JAX aborts."""
START = 60
"""Seconds that workers wait for one that has not started: all start at once on one machine."""

MOST = 256
"""Workers on one machine."""


def launch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- train MODEL …", help=f"Command that every worker runs: {TOGETHER}."),
    ],
    processes: Annotated[
        int, typer.Option("-n", "--processes", min=1, max=MOST, help="Number of worker processes.")
    ] = 2,
    restarts: Annotated[
        int, typer.Option(min=0, help="Maximum number of successive restarts without a new checkpoint.")
    ] = 3,
) -> None:
    """Start local workers that run one command together, and restart training if one fails.

    Prints the output of the first worker. To resume after a failure, training needs --checkpoint.
    """
    from layoutopt.runtime.launching import launch as run
    from mesh_tf_core.errors import UserError

    if command[0] not in AFTER_FAILURE:
        raise UserError(
            f"launch runs only {TOGETHER} in several processes, not {command[0]!r}; write for example "
            f"layoutopt launch -n {processes} -- train MODEL …"
        )
    given = {word.partition("=")[0] for word in command}
    if own := [name for name in OWN if name in given]:
        raise UserError(
            f"launch sets the processes and their coordinator; remove {', '.join(own)}, or start "
            "every process yourself without launch"
        )
    whole = [command[0], "--cluster", "--start-timeout", str(START), *command[1:]]
    say = Terminal().say
    code = run(
        whole,
        processes,
        restarts,
        _checkpoint(command) if command[0] == "train" else None,
        lambda text: say(f"launch: {text}"),
        AFTER_FAILURE[command[0]],
    )
    raise typer.Exit(code)


def _checkpoint(command: list[str]) -> Path | None:
    """The directory of `--checkpoint`; if it is given again, of the last, as in the command itself."""
    found = None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--checkpoint":
            found = Path(value if equals else following)
    return found

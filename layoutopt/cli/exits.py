"""The exit of every command: one line on stderr (three if nothing fits) and an exit code for every error;
with `--json` an object in one line: {"error": message, "exit": code}, with the repairs if nothing fits.

0 done, 2 the user's input is wrong, 3 proven infeasible, 4 stopped at a limit with nothing found,
5 a process of several was lost, 6 a bound of `check` is broken, 130 ended by Ctrl-C, 143 by SIGTERM and 129
by SIGHUP, after saving.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from layoutopt.plan.units import clean, shorten
from layoutopt.runtime import signals

INFEASIBLE, STOPPED = 3, 4
BROKEN_PIPE = 141  # 128 + SIGPIPE, as programs that the signal ends
LONGEST = 300
"""Characters of one word that an error repeats."""
NOTHING: Mapping[str, Any] = {}
_LONG = re.compile(rf"\S{{{LONGEST},}}")


@contextlib.contextmanager
def handled(words: Sequence[str]) -> Iterator[None]:
    """Turns errors inside the block into one line and an exit code.

    Args:
      words: the command line.
    """
    as_json = "--json" in words
    try:
        yield
    except ValueError as error:
        # Only a command that ran can raise one; help should not wait for this import.
        from mesh_tf_core.errors import UserError

        if not isinstance(error, UserError):
            raise
        fail(str(error), error.exit_code, as_json, error.more)
    except KeyboardInterrupt:
        sys.exit(signals.exit_code())
    except BrokenPipeError:
        _reader_gone()
    except OSError as error:
        fail(_of_the_system(error), 2, as_json)


def fail(message: str, code: int, as_json: bool, more: Mapping[str, Any] = NOTHING) -> NoReturn:
    """Prints the error and ends the process."""
    tell(message, code, as_json, more)
    sys.exit(code)


def tell(message: str, code: int, as_json: bool, more: Mapping[str, Any] = NOTHING) -> None:
    """Prints an error in the form of all commands; `more` is for programs only. What nothing fits into has a
    line of its own, and so have the least that is possible and why."""
    parts = message.splitlines() if code in (INFEASIBLE, STOPPED) else [message]
    lines = [_LONG.sub(lambda found: shorten(found[0], LONGEST), " ".join(part.split())) for part in parts]
    told = json.dumps({"error": "; ".join(lines), "exit": code, **more})
    told = told if as_json else "\n".join(map(clean, [f"error: {lines[0]}", *lines[1:]]))
    with contextlib.suppress(OSError):  # the code says it too
        print(told, file=sys.stderr, flush=True)


def _of_the_system(error: OSError) -> str:
    """A refusal of the system that nobody put into words of ours."""
    if error.filename is not None:
        return f"{str(error.filename)!r}: {error.strerror or error}"
    return (
        f"the result cannot be printed: {error.strerror or error}; free disk space, or redirect the "
        "output elsewhere"
    )


def _reader_gone() -> NoReturn:
    # Python flushes stdout once more when it ends; that must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(BROKEN_PIPE)

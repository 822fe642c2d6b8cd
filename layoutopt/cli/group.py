"""The way out of every command: one line on stderr and the exit code, whatever happened. With `--json` the
line is an object: {"error": what is wrong, "exit": the code}, where nothing fits with what would help.

0 done, 2 the user's input is wrong, 3 proven infeasible, 4 stopped at a limit with nothing found,
5 a process of several was lost, 130 ended by Ctrl-C, 143 by SIGTERM and 129 by SIGHUP, after saving.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from layoutopt import signals
from layoutopt.cli.hints import usage
from layoutopt.plan.units import clean, shorten

CTRL_C = 130  # 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE, as programs that the signal ends
LONGEST = 300
"""Characters of one word that an error repeats."""
NOTHING: Mapping[str, Any] = {}
_LONG = re.compile(rf"\S{{{LONGEST},}}")


class Group(TyperGroup):
    """The commands, and the one place that turns errors into exit codes."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        given: Sequence[str] | None = args[0] if args else kwargs.get("args")
        words = sys.argv[1:] if given is None else given
        as_json = "--json" in words
        # But for `train`, which hears all, a worker of several has nothing to save by itself.
        several = any(word.partition("=")[0] in ("--cluster", "--coordinator") for word in words)
        numbers = (signal.SIGINT,) if several else signals.ENDING
        try:
            with signals.command(numbers):
                code = super().main(*args, **kwargs)
            sys.stdout.flush()
        except ValueError as error:
            # Only a command that ran can raise one; help should not wait for this import.
            from mesh_tf_core.errors import UserError

            if not isinstance(error, UserError):
                raise
            _fail(str(error), error.exit_code, as_json, error.more)
        except typer.TyperException as error:
            _fail(usage(error, words), error.exit_code, as_json)
        except typer.Abort:
            _fail("stopped", signals.exit_code(), as_json)
        except KeyboardInterrupt:
            sys.exit(signals.exit_code())
        except BrokenPipeError:
            _reader_gone()
        except OSError as error:
            _fail(_of_the_system(error), 2, as_json)
        # Typer knows one code for KeyboardInterrupt, whichever signal raised it.
        sys.exit(signals.exit_code() if code == CTRL_C else code if isinstance(code, int) else 0)


def _fail(message: str, code: int, as_json: bool, more: Mapping[str, Any] = NOTHING) -> NoReturn:
    tell(message, code, as_json, more)
    sys.exit(code)


def tell(message: str, code: int, as_json: bool, more: Mapping[str, Any] = NOTHING) -> None:
    """Says what was wrong, as every command does; `more` is for programs alone."""
    line = _LONG.sub(_shortened, " ".join(message.split()))
    told = json.dumps({"error": line, "exit": code, **more}) if as_json else f"error: {clean(line)}"
    with contextlib.suppress(OSError):  # the code says it too
        print(told, file=sys.stderr, flush=True)


def _shortened(found: re.Match[str]) -> str:
    return shorten(found[0], LONGEST)


def _of_the_system(error: OSError) -> str:
    """A refusal of the system that nobody put into words of ours."""
    if error.filename is not None:
        return f"{str(error.filename)!r}: {error.strerror or error}"
    return f"the result cannot be printed: {error.strerror or error}; make room, or print it elsewhere"


def _reader_gone() -> NoReturn:
    # Python flushes stdout once more when it ends; that must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(BROKEN_PIPE)

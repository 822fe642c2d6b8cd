"""The way out of every command: one line on stderr and the exit code, whatever happened.

0 done, 2 the user's input is wrong, 3 proven infeasible, 4 stopped at a limit with nothing found,
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

BROKEN_PIPE = 141  # 128 + SIGPIPE, as programs that the signal ends


class Group(TyperGroup):
    """The commands, and the one place that turns errors into exit codes."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
            sys.stdout.flush()
        except ValueError as error:
            # Only a command that ran can raise one; help should not wait for this import.
            from mesh_tf_core.errors import UserError

            if not isinstance(error, UserError):
                raise
            _fail(str(error), error.exit_code)
        except typer.TyperException as error:
            _fail(_usage(error), error.exit_code)
        except typer.Abort:
            _fail("stopped", 130)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            _reader_gone()
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _usage(error: typer.TyperException) -> str:
    text = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text}; see {context.command_path} --help" if context is not None else text


def _reader_gone() -> NoReturn:
    # Python flushes stdout once more when it ends; that must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(BROKEN_PIPE)

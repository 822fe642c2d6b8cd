"""The way out of every command: one line on stderr and the exit code, whatever happened. With `--json` the
line is an object: {"error": what is wrong, "exit": the code}.

0 done, 2 the user's input is wrong, 3 proven infeasible, 4 stopped at a limit with nothing found,
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

BROKEN_PIPE = 141  # 128 + SIGPIPE, as programs that the signal ends


class Group(TyperGroup):
    """The commands, and the one place that turns errors into exit codes."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        given: Sequence[str] | None = args[0] if args else kwargs.get("args")
        as_json = "--json" in (sys.argv[1:] if given is None else given)
        try:
            code = super().main(*args, **kwargs)
            sys.stdout.flush()
        except ValueError as error:
            # Only a command that ran can raise one; help should not wait for this import.
            from mesh_tf_core.errors import UserError

            if not isinstance(error, UserError):
                raise
            _fail(str(error), error.exit_code, as_json)
        except typer.TyperException as error:
            _fail(_usage(error), error.exit_code, as_json)
        except typer.Abort:
            _fail("stopped", 130, as_json)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            _reader_gone()
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, as_json: bool) -> NoReturn:
    line = " ".join(message.split())
    told = json.dumps({"error": line, "exit": code}, ensure_ascii=False) if as_json else f"error: {line}"
    print(told, file=sys.stderr)
    sys.exit(code)


def _usage(error: typer.TyperException) -> str:
    text = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text}; see {context.command_path} --help" if context is not None else text


def _reader_gone() -> NoReturn:
    # Python flushes stdout once more when it ends; that must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(BROKEN_PIPE)

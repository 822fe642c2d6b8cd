"""The commands as one group: its help and its exit (`exits`)."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from layoutopt.cli.exits import fail, handled
from layoutopt.cli.hints import usage
from layoutopt.cli.listing import PLANNING, short_listing, show_help
from layoutopt.cli.panels import asks_short, short_help
from layoutopt.runtime import signals

CTRL_C = 130  # 128 + SIGINT


class CommandGroup(TyperGroup):
    """The commands, and where their errors turn into exit codes."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        given: Sequence[str] | None = args[0] if args else kwargs.get("args")
        words = sys.argv[1:] if given is None else given
        if asks_short(words) and (len(words) == 1 or words[0] in self.commands):
            name = words[0] if len(words) == 2 else ""
            print(short_help(self.commands[name], f"layoutopt {name}") if name else short_listing())
            sys.exit(0)
        if words and words[0] in self.commands:
            from mesh_tf_core.engines.jax import compat

            # A model file may start JAX: to plan takes no accelerator from a job.
            if words[0] in PLANNING or not compat.accelerated():
                compat.stay_on_cpu()
        as_json = "--json" in words
        # But for `train`, which hears all, a worker of several has nothing to save by itself.
        several = any(word.partition("=")[0] in ("--cluster", "--coordinator") for word in words)
        numbers = (signal.SIGINT,) if several else signals.ENDING
        with handled(words):
            try:
                with signals.command(numbers):
                    code = super().main(*args, **kwargs)
                sys.stdout.flush()
            except typer.TyperException as error:
                fail(usage(error, words), error.exit_code, as_json)
            except typer.Abort:
                fail("stopped", signals.exit_code(), as_json)
        # Typer knows one code for KeyboardInterrupt, whichever signal raised it.
        sys.exit(signals.exit_code() if code == CTRL_C else code if isinstance(code, int) else 0)

    def format_help(self, *_: Any) -> None:
        show_help()

    def list_commands(self, *_: Any) -> list[str]:
        return [*self.commands]

"""Streams of output: results to stdout, progress and messages to stderr, one JSON object with `--json`.

Colour and width follow the terminal; in a pipe there is no colour, nothing is cut off and no line ends in
spaces. rich obeys NO_COLOR.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.text import Text

from layoutopt.cli.sheet import Facts, Sheet
from layoutopt.cli.streams import has_unicode
from layoutopt.plan.units import clean
from reports.views.view import View

if TYPE_CHECKING:
    from layoutopt.plan.fields import Data
    from mesh_tf_core import Layout

PIPE_WIDTH = 240
GOOD, DOUBT, BAD = "bold green", "bold yellow", "bold red"
FITS = {"yes": GOOD, "barely": DOUBT, "no": BAD}
"""Colours of `layoutopt.plan.known.Known.fits`."""
"""Colours of verdicts, which the words say too."""
PLAIN: Mapping[str, str] = {}


class _Console(Console):
    def render(self, renderable: RenderableType, options: Any = None) -> Iterator[Segment]:
        """Names of files and models must not control the terminal."""
        for each in super().render(renderable, options):
            text = "\n".join(map(clean, each.text.split("\n")))
            yield each if each.control or text == each.text else Segment(text, each.style)

    def on_broken_pipe(self) -> None:
        """A reader that has gone is handled at the door, for all kinds of output alike."""
        raise BrokenPipeError


class Terminal:
    """The two streams of one command.

    Args:
      as_json: print one JSON object and nothing else on stdout.
      quiet: no progress and no messages on stderr.
      shown: False if another process of the job prints the output.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False, shown: bool = True) -> None:
        self.as_json, self.quiet, self.shown = as_json, quiet or not shown, shown
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    @property
    def live(self) -> bool:
        """True if a moving display makes sense."""
        return self.err.is_terminal and not self.quiet

    def say(self, text: str) -> None:
        """A message, on stderr."""
        if not self.quiet:
            with contextlib.suppress(OSError):  # a message must not keep a result from its place
                self.err.print(Text(text), highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self, what: str, said: bool = False) -> Iterator[None]:
        """Shows a message on a terminal while something takes time; elsewhere prints it as one line if it is
        to be `said`."""
        if not self.live:
            if said:
                self.say(what)
            yield
            return
        with self.err.status(Text(what)):
            yield

    def show(self, *parts: RenderableType | View) -> None:
        """Results for people, on stdout; nothing with `--json`."""
        if self.as_json or not self.shown:
            return
        for part in parts:
            drawn = Text(part) if isinstance(part, str) else Sheet(part) if isinstance(part, View) else part
            if self.out.is_terminal:
                self.out.print(drawn, highlight=False)
                continue
            with self.out.capture() as found:
                self.out.print(drawn, highlight=False)
            for line in found.get().splitlines():
                self.out.print(Text(line.rstrip()), highlight=False, soft_wrap=True)

    def show_whole(self, *lines: str) -> None:
        """Lines to be copied, on stdout, which no width breaks."""
        if self.shown and not self.as_json:
            for line in lines:
                self.out.print(Text(line), highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def saved(self, out: Path | None, save: Callable[[Path], object], what: str) -> Iterator[bool]:
        """Writes a requested file before the output inside the block, whose reader may leave; a failure is
        raised after the output. Gives whether it was written."""
        from mesh_tf_core.errors import UserError

        failed, out = None, out if self.shown else None
        if out is not None:
            try:
                save(out)
            except UserError as error:
                failed = error
        yield out is not None and failed is None
        if failed is not None:
            raise failed
        if out is not None:
            self.say(f"wrote {what} to {out}")

    def result(self, data: Data) -> None:
        """The result for programs; nothing without `--json`."""
        if self.shown and self.as_json:
            out = self.out.file  # while a thread still runs the user's code, `sys.stdout` is its stderr
            ascii = not has_unicode(out)
            out.write(json.dumps(plain(data), indent=2, allow_nan=False, ensure_ascii=ascii) + "\n")


def _console(stream: IO[str]) -> Console:
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Console(file=stream, width=wide, markup=False, emoji=False)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def facts(rows: Iterable[tuple[str, str]], verdicts: Mapping[str, str] = PLAIN) -> Facts:
    """Names and values, without lines.

    Args:
      verdicts: name to `GOOD`, `DOUBT` or `BAD`, the colour of its value.
    """
    return Facts(tuple(rows), verdicts)


def layout_text(layout: Layout) -> str:
    """A layout for people."""
    return str(layout) or "replicated (nothing is split)"

"""Moving displays on stderr: the state of a search, the progress of a run of steps."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn

from layoutopt.cli.terminal import Terminal
from layoutopt.plan.units import duration_text

if TYPE_CHECKING:
    from layoutopt.optimize.entry import SearchStatus


EVERY = 10.0
"""Seconds between two lines where nothing moves."""
ENOUGH = 3
"""Number of steps after the first whose mean predicts the time of the remaining steps."""


class Display(contextlib.AbstractContextManager["Display"]):
    """A rich progress display on a terminal, which leaves nothing behind; elsewhere a line now and then.

    Args:
      lines: print these lines; None: the command prints its own.
    """

    def __init__(self, terminal: Terminal, *columns: Any, lines: bool = True) -> None:
        self.progress = Progress(*columns, console=terminal.err, transient=True, disable=not terminal.live)
        self.task: TaskID | None = None
        self.terminal, self.ended = terminal, threading.Event()
        self.spoken = lines and not (terminal.live or terminal.quiet)
        self.speaker = threading.Thread(target=self._say, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self.progress.start()
        if self.spoken:
            self.speaker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.spoken:
            self.speaker.join()
        self.progress.stop()

    def _say(self) -> None:
        while not self.ended.wait(EVERY):
            for task in self.progress.tasks:
                self.terminal.say(self.line(task))

    def line(self, task: Task) -> str:
        """How far it is, in a line."""
        return f"{task.description} ({duration_text(round(task.elapsed or 0.0))})"


class Bounds(Display):
    """A search: the best answer so far, the proven bound, and the gap between them.

    Args:
      shown: how an objective is written.
    """

    def __init__(self, terminal: Terminal, what: str, shown: Callable[[float], str]) -> None:
        super().__init__(
            terminal, SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        )
        self.what, self.shown, self.space, self.best = what, shown, "", math.inf
        self.task = self.progress.add_task(what, total=None)

    def update(self, best: float, bound: float, where: str = "") -> None:
        """Shows better numbers; infinite ones are unknown."""
        assert self.task is not None
        known = bounds_text(best, bound, self.shown)
        self.progress.update(self.task, description=f"{where or self.what}: {known}")

    def show(self, now: SearchStatus) -> None:
        """How far a search of several meshes is; a line where it has proven the best usual layout."""
        from layoutopt.space.allow import USUAL

        if self.space == USUAL != now.space and math.isfinite(self.best):
            best = self.shown(self.best)
            self.terminal.say(f"the best {self.space} layout: {best}; searching {now.space} (Ctrl-C ends it)")
        self.space, self.best, part = (
            now.space,
            now.best,
            f", {now.part:.0%} of its tables" if now.part else "",
        )
        where = ", ".join(filter(None, (self.what, now.space, now.looked)))
        where += f" ({now.number:,} of {now.count:,}{part})" * bool(now.count)
        self.update(now.best, now.bound, where)


def bounds_text(best: float, bound: float, shown: Callable[[float], str]) -> str:
    """Best, bound and gap in words."""
    parts = [f"best {shown(best)}" if math.isfinite(best) else "nothing found yet"]
    if math.isfinite(bound):
        parts.append(f"bound {shown(bound)}" if bound > 0 else "no bound yet")
        if math.isfinite(best) and bound > 0:
            parts.append(f"gap {100 * (best - bound) / best:.2f}%")
    return ", ".join(parts)


class StepProgress(Display):
    """Steps done of a known total, with a line of numbers beside the bar.

    Args:
      left: also show the time of the remaining steps, predicted from the steps after the first.
      lines: of `Display`.
    """

    def __init__(
        self, terminal: Terminal, what: str, total: int, left: bool = False, lines: bool = True
    ) -> None:
        super().__init__(
            terminal,
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}", style="bold", markup=False),
            TextColumn("{task.fields[facts]}", markup=False),
            lines=lines,
        )
        self.task = self.progress.add_task(what, total=total, facts="")
        self.total, self.left = total, left
        self.first: tuple[int, float] | None = None

    def line(self, task: Task) -> str:
        count = f"{task.completed:,.0f}/{task.total or 0:,.0f}"
        return ", ".join(filter(None, (f"{task.description} {count}", str(task.fields["facts"]))))

    def update(self, done: int, facts: str = "", total: int | None = None) -> None:
        """`facts`: further numbers after that step; `total`: a better number of steps."""
        assert self.task is not None
        self.total = total or self.total
        facts = ", ".join(filter(None, (facts, self._left(done, time.monotonic()))))
        self.progress.update(self.task, completed=done, facts=facts, total=total)

    def _left(self, done: int, now: float) -> str:
        """About how long it still takes; '' while too little is known."""
        if not self.left or done < 1:
            return ""
        if self.first is None:
            self.first = done, now
        count, spent = done - self.first[0], now - self.first[1]
        if count < ENOUGH or done >= self.total:
            return ""
        return f"about {duration_text(max(round(spent / count * (self.total - done)), 1))} left"

"""What every solver takes and gives, so that the rest does not know which one ran."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from layoutopt.problem.answer import Status
from layoutopt.problem.form import Choices
from layoutopt.problem.linear import Constraint, Program

Result = TypeVar("Result")
Progress = Callable[[float, float], None]
"""Called with (best objective so far or inf, proven lower bound or -inf) whenever one of them improves."""


@dataclass(frozen=True)
class Options:
    """How long and how to search. `workers` threads share the work; the result is the same on every run."""

    time_limit: float | None = None
    workers: int = 1
    seed: int = 0


class Clock:
    """Counts down a time limit that several calls share."""

    def __init__(self, limit: float | None) -> None:
        self.start = time.monotonic()
        self.limit = limit
        self.stopped = threading.Event()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def left(self) -> float | None:
        """Seconds until the limit, at least 0; None without a limit."""
        return None if self.limit is None else max(0.0, self.limit - self.elapsed)

    @property
    def over(self) -> bool:
        """The limit has passed, or somebody asked to stop."""
        return self.left == 0.0 or self.stopped.is_set()


@dataclass(frozen=True)
class Raw:
    """What a solver says about one program, not yet believed; `bound` is -inf if nothing is proven."""

    status: Status
    choices: Choices | None
    bound: float


@dataclass(frozen=True)
class Request:
    """One call of a solver: the program, the resource rows and exclusions in it, and where to start."""

    program: Program
    constraints: Sequence[Constraint]
    options: Options
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set from outside when the solver should give up."""
    hint: Choices | None = None
    on_solution: Callable[[Choices, float], None] | None = None
    """Called with each better solution of the program and the bound known then."""
    on_bound: Callable[[float], None] | None = None
    """Called with each better bound."""
    meanwhile: Callable[[], None] | None = None
    """A little other work: called again and again while a solver works in a process of its own."""


class Solver(Protocol):
    """Solves one 0/1 program."""

    def __call__(self, request: Request) -> Raw:
        """The best choices of `request.program` under `request.constraints`."""


def interruptible(
    work: Callable[[], Result],
    stopped: Callable[[], bool],
    stop: Callable[[], None],
    meanwhile: Callable[[], None] | None = None,
) -> Result:
    """Runs `work` in a thread, so that Python hears Ctrl-C meanwhile, and does `meanwhile` again and again;
    calls `stop` once it is `stopped`.

    Raises what `work` raises, and what `stop` raises if the work cannot be stopped; its thread is then left
    behind.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # carried to the calling thread
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True).start()
    while not done.wait(0.0 if meanwhile else 0.1):
        if stopped():
            stop()
        elif meanwhile:
            meanwhile()
    if errors:
        raise errors[0]
    return results[0]


@contextlib.contextmanager
def ctrl_c(stopped: threading.Event) -> Iterator[None]:
    """Within it, the first Ctrl-C only sets `stopped`; the second is the usual KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

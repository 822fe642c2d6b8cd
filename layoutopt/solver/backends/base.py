"""The interface of every solver, so that other code does not depend on the solver."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from layoutopt.solver.answer import Status
from layoutopt.solver.form import Choices
from layoutopt.solver.linear import Constraint, LinearProgram

WorkResult = TypeVar("WorkResult")
SolverProgress = Callable[[float, float], None]
"""Called with (best objective so far or inf, proven lower bound or -inf) whenever one of them improves."""
LEAVING = 0.3
"""Seconds that stopped work has to end before its thread is left behind."""


@dataclass(frozen=True)
class Raw:
    """A solver's claim about one program, not yet checked; `bound` is -inf if nothing is proven."""

    status: Status
    choices: Choices | None
    bound: float


def read_status(solver: str, word: str, known: Mapping[str, Status]) -> Status:
    """A solver's word for the end of its work as ours."""
    if word not in known:
        raise RuntimeError(
            f"{solver} rejected the model that layoutopt built (status {word}); please report this as a bug"
        )
    return known[word]


@dataclass(frozen=True)
class SolverRequest:
    """One call of a solver: the program, the resource rows and exclusions in it, and where to start."""

    program: LinearProgram
    constraints: Sequence[Constraint]
    time_limit: float | None = None
    hint: Choices | None = None
    on_solution: Callable[[Choices, float], None] | None = None
    """Called with each better solution of the program and the bound known then."""
    on_bound: Callable[[float], None] | None = None
    """Called with each better bound."""
    meanwhile: Callable[[], None] | None = None
    """A little other work, called repeatedly while a solver runs in a separate process."""


class Solver(Protocol):
    """Solves one 0/1 program."""

    def __call__(self, request: SolverRequest) -> Raw:
        """The best choices of `request.program` under `request.constraints`."""


def interruptible(work: Callable[[], WorkResult], stop: Callable[[], None]) -> WorkResult:
    """Runs `work` in a thread, so that Python receives Ctrl-C and the clock can end it; calls `stop` if it is
    ended. Raises exceptions of `work`; its thread is abandoned if it does not stop."""
    results, errors = list[WorkResult](), list[BaseException]()
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # carried to the calling thread
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        while not done.wait(0.1):
            pass
    except BaseException:
        with contextlib.suppress(Exception):
            stop()
        done.wait(LEAVING)
        raise
    if errors:
        raise errors[0]
    return results[0]

"""What every solver takes and gives, so that the rest does not know which one ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from layoutopt.problem.answer import Status
from layoutopt.problem.form import Choices
from layoutopt.problem.linear import Constraint, Program

Progress = Callable[[float, float], None]
"""Called with (best objective so far or inf, proven lower bound or -inf) whenever one of them improves."""


@dataclass(frozen=True)
class Options:
    """How long and how to search. `workers` threads share the work; the result is the same on every run."""

    time_limit: float | None = None
    workers: int = 2
    seed: int = 0


class Clock:
    """Counts down a time limit that several calls share."""

    def __init__(self, limit: float | None) -> None:
        self.start = time.monotonic()
        self.limit = limit

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
        """The limit has passed."""
        return self.left == 0.0


@dataclass(frozen=True)
class Raw:
    """What a solver says about one program: not yet believed. `bound` is proven for the program, -inf if
    nothing is.
    """

    status: Status
    choices: Choices | None
    bound: float
    interrupted: bool = False


@dataclass(frozen=True)
class Request:
    """One call of a solver: the program, the resource rows and exclusions in it, and where to start."""

    program: Program
    constraints: Sequence[Constraint]
    options: Options
    hint: Choices | None = None
    on_solution: Callable[[Choices, float], None] | None = None
    """Called with each better solution of the program and the bound known then."""
    on_bound: Callable[[float], None] | None = None
    """Called with each better bound."""


class Solver(Protocol):
    """Solves one 0/1 program."""

    def __call__(self, request: Request) -> Raw:
        """The best choices of `request.program` under `request.constraints`."""

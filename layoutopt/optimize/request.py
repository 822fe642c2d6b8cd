"""What is asked of a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from costmodels.hardware import Hardware
from layoutopt.evaluator import Evaluator
from layoutopt.space.decisions import KINDS
from layoutopt.space.kind import Allowed
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.model import Model

Progress = Callable[[str, float, float], None]
"""on_progress(mesh, best seconds so far, proven bound on this mesh)."""
Better = Callable[[str, float, int], None]
"""on_better(layout in words, its seconds, its bytes): the best so far that fits is now another one."""
OBJECTIVES = ("time", "memory", "pareto")
EXACT = 1e-7
"""Relative gap below which a bound equals its objective: solvers count costs in whole units of about this
size."""
Rules = str | Mapping[str, Axes] | None


@dataclass(frozen=True)
class Request:
    """The question, checked.

    Attributes:
      limit: bytes a device may hold.
      allowed: what may be chosen.
      deadline: of the monotonic clock.
    """

    model: Model
    hardware: Hardware
    limit: float
    objective: str
    allowed: Allowed
    top: int
    deadline: float | None
    on_progress: Progress | None
    on_better: Better | None

    def __post_init__(self) -> None:
        for kind in KINDS:
            kind.check(self.allowed)

    @cached_property
    def evaluator(self) -> Evaluator:
        """What answers this question: nothing is evaluated twice."""
        return Evaluator(self.model, self.hardware)

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return self.deadline is not None and time.monotonic() > self.deadline

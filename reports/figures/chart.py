"""A figure of a plan: drawn, described in words, or missing, with the command that adds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutopt.plan.schema import PlanFile
from mesh_tf_core.errors import UserError
from reports.figures.sheet import settings
from reports.reader import PlanLike, plan_of
from reports.views.view import View

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def round_steps(high: float, count: int = 4) -> list[float]:
    """0 and the multiples of a round step up to `high`, about `count` of them."""
    return _multiples(0.0, high, count) if high > 0 else [0.0]


def _multiples(low: float, high: float, count: int) -> list[float]:
    """The multiples of a round step in a range: two or more, about `count` of them."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(count, steps=STEPS).tick_values(low, high)
    return [float(x) for x in found if low <= x <= high * (1 + 1e-9)]


def byte_steps(high: float, count: int = 4) -> list[float]:
    """As `round_steps`, round in the binary unit that `high` is written in."""
    unit = 1024.0 ** max(0, math.floor(math.log(max(high, 1.0), 1024)))
    return [unit * v for v in round_steps(high / unit, count)]


def log_steps(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers inside [low, high] for a logarithmic axis, at most about `most` of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for mantissas in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        found = [
            m * 10.0**e
            for e in range(first, last + 1)
            for m in mantissas
            if low * 0.999 <= m * 10.0**e <= high * 1.001
        ]
        if len(found) <= most:
            break
    stride = max(1, math.ceil(len(found) / most))
    if len(found) > 1:
        return found[::stride]
    return _multiples(low, high, 2) if low < high else [low]


def padded(values: Sequence[float], share: float = 0.08) -> tuple[float, float]:
    """The range of positive values on a logarithmic axis with room on both sides."""
    low, high = min(values), max(values)
    room = max((high / low) ** share, 1.06)
    return low / room, high * room


if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEARCH = "to include this section, run `layoutopt search MODEL --report FILE.html`"


@dataclass(frozen=True)
class Chart:
    """One figure. Call it with a plan (a dict of a plan file, or a read one) for a matplotlib Figure.

    Attributes:
      name: of its file, and of the function that draws it.
      title: the question of the figure.
      draw: (plan, title above the drawing) → Figure.
      find: the finding about this plan, in one sentence.
      view: the numbers of the figure, which say it in words to people who do not see it.
      missing: the command to run if the plan lacks the data, else ''.
    """

    name: str
    title: str
    draw: Callable[[PlanFile, str], Figure]
    find: Callable[[PlanFile], str]
    view: Callable[[PlanFile], View]
    missing: Callable[[PlanFile], str]

    def __call__(self, plan: PlanLike, titled: bool = True) -> Figure:
        """The figure, 400 points wide; `titled` writes its finding above it.

        Raises:
          UserError: the plan is not one, or lacks what this figure shows.
        """
        found = plan_of(plan)
        if need := self.missing(found):
            raise UserError(
                f"the plan of {found.model.name[:60]!r} has no data for the figure {self.name!r}: {need}"
            )
        with settings():
            return self.draw(found, self.find(found) if titled else "")


def chart(
    title: str,
    find: Callable[[PlanFile], str],
    view: Callable[[PlanFile], View],
    missing: Callable[[PlanFile], str] = lambda plan: "",
) -> Callable[[Callable[[PlanFile, str], Figure]], Chart]:
    """The figure that a function draws; arguments as of `Chart`."""
    return lambda draw: Chart(draw.__name__, title, draw, find, view, missing)

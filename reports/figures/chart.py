"""A figure of a plan: drawn, described in words, or missing, with the command that adds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutopt.plan.schema import PlanFile
from mesh_tf_core.errors import UserError
from reports.figures.sheet import settings
from reports.reader import PlanLike, plan_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEARCH = "to include this section, run `layoutopt search MODEL --report FILE.html`"


@dataclass(frozen=True)
class Chart:
    """One figure. Call it with a plan (a dict of a plan file, or a read one) for a matplotlib Figure.

    Attributes:
      name: of its file.
      title: the question of the figure.
      draw: (plan, title above the drawing) → Figure.
      find: the finding about this plan, in one sentence.
      tell: a description of the whole figure in words, for people who do not see it.
      missing: the command to run if the plan lacks the data, else ''.
    """

    name: str
    title: str
    draw: Callable[[PlanFile, str], Figure]
    find: Callable[[PlanFile], str]
    tell: Callable[[PlanFile], str]
    missing: Callable[[PlanFile], str] = lambda plan: ""

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

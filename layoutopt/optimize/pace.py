"""The progress of a search, in words and seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from layoutopt.optimize.subproblems import Subproblem


@dataclass
class Pace:
    """The pace of a search through its problems.

    Attributes:
      spent: seconds that each problem took.
      since: when the one that is looked at now was begun, of `time.monotonic`.
    """

    spent: list[float] = field(default_factory=list)
    since: float = 0.0

    def begin(self) -> None:
        """The next problem is looked at."""
        self.since = time.monotonic()

    def end(self) -> None:
        """It was looked at."""
        self.spent.append(time.monotonic() - self.since)

    def left(self, part: float, others: int, limit: float | None) -> float | None:
        """Seconds that the search will take yet, about; None: unknown.

        Args:
          part: finished share of the current problem.
          others: problems that are to be looked at after it.
          limit: seconds that are left of a time limit.
        """
        now = time.monotonic() - self.since
        whole = now / part if part > 0 else max([now, *self.spent[-1:]])
        if not self.spent and part <= 0:
            return limit
        left = whole - now + others * sum([*self.spent, whole]) / (len(self.spent) + 1)
        return left if limit is None else min(left, limit)


def looked_at(subproblem: Subproblem, renames: bool, points: int) -> str:
    """Describes the subproblems that are searched.

    Args:
      renames: a plan gives the axes of its mesh other names.
      points: of a frontier, that were found.
    """
    mesh, parts, decided = subproblem.mesh, subproblem.microbatches, subproblem.decided
    looked = f"mesh {'x'.join(map(str, mesh.shape)) if renames else mesh}"
    looked += f", {parts} microbatches" if parts > 1 else ""
    stages = decided.stages_on(mesh).items()
    looked += "".join(f", {n} pipeline stages of {dim}" for dim, n in stages)
    looked += f", schedule {decided.schedule}" if stages else ""
    looked += "".join(f", recompute {text}" for text in sorted(decided.again))
    return looked + (f", point {points + 1} of the frontier" if points else "")

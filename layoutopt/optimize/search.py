"""All problems of a search, one for every mesh shape, number of microbatches and choice of pipeline stages,
and the best over them.

Every query has one form: which layout is fastest within a number of bytes (`fastest`)? Time against memory is
this query with less and less memory: an answer holds for every limit from its own peak up to the queried one,
and a bound for every lower limit.

A search can be ended at any time, by its clock or by Ctrl-C: layouts are stored as they are predicted
(`incumbents`), and bounds as they rise, so the best so far and its bound are always known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from layoutopt.optimize.agreement import hold_rows
from layoutopt.optimize.fastest import NAMED_SHARE, FastestSearch
from layoutopt.optimize.least_memory import least_memory
from layoutopt.optimize.merging import simplest
from layoutopt.optimize.needed import ADVICE, EXCLUDED, nearest_of, needed
from layoutopt.optimize.request import ANSWERED, SEARCHED, uneven
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.optimize.subproblems import Subproblem
from layoutopt.optimize.warm_start import WarmStart
from layoutopt.plan.units import size_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.allow import USUAL
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import InfeasibleError, LimitError

STOPPING, STOPPED = 5.0, 0.4
"""Seconds after Ctrl-C for predicting named layouts, if nothing that fits is known, else for any work."""
EVENLY = " with equal shards"
"""Note about layouts with equal shards if other layouts could split further."""
MOST_POINTS = 200


@dataclass
class LayoutSearch(FastestSearch):
    """A search for the best layout by any objective, and how it ended.

    Attributes:
      stopped: Ctrl-C ended it.
      none: why there is no answer, if that is proven.
      nearest: the layout that was found to need least memory, where none fits.
      start: what is predicted before the problems are listed.
      after: the search from whose results it goes on.
      seconds: from the start of the request's clock to its end.
    """

    best: EvaluatedLayout | None = None
    stopped: bool = False
    none: str = ""
    nearest: EvaluatedLayout | None = None
    start: WarmStart | None = None
    after: LayoutSearch | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.after is not None:
            self.incumbents.found += self.after.incumbents.found
            self.incumbents.subproblems |= self.after.incumbents.subproblems

    @property
    def considered(self) -> int:
        """The number of combinations of decisions."""
        if self.after is not None and not self.listed:
            return self.after.considered
        return sum(each.layouts for each in self.incumbents.subproblems.values())

    def run(self, subproblems: Iterable[Subproblem], keep_best: bool = False) -> EvaluatedLayout:
        """The best layout over all subproblems, or the error with the reason why there is none.

        Args:
          keep_best: Ctrl-C ends the search with the best so far; KeyboardInterrupt if there is none.
        """
        clock = self.request.clock
        try:
            grace, needed = (ANSWERED,) * 2 if clock.over else (SEARCHED, 0.0)  # loading took all the time
            ended = clock.within(grace, lambda: self._look(subproblems), needed)
        except KeyboardInterrupt:
            if not keep_best:
                raise
            ended, self.stopped = False, True
            clock.hurry()
            with suppress(KeyboardInterrupt):
                self.told("stopping")
        finally:
            self.both.end()
        self.seconds = clock.elapsed
        if not ended or (self.best is None and not self.proven):
            self._conclude()
        if self.best is not None:
            return self.best
        if self.proven:
            even = EVENLY if uneven(self.request, (each.mesh for each in self.problems)) else ""
            what = f"no {'usual ' * (self.called == USUAL)}layout of {self.request.model.name!r}{even}"
            self.none = f"{what} fits into {size_text(self.request.limit)} per device"
            raise InfeasibleError(self.none)
        if self.stopped:
            raise KeyboardInterrupt
        raise LimitError(
            "no layout was found within the time limit, so one may or may not fit; raise --time-limit"
        )

    def _look(self, subproblems: Iterable[Subproblem]) -> None:
        """Sets `best`, and whether that, or that there is none, is proven."""
        request = self.request
        if self.start is not None:
            self.incumbents.know(self.start)
            if request.clock.limit is not None:
                self.incumbents.price_named(self.start, request.clock.part(NAMED_SHARE), self.told)
        self.problems = [*subproblems]
        known = {} if self.after is None else self.after.incumbents.subproblems
        self.incumbents.subproblems = {**known, **{each.key: each for each in self.problems}}
        self.listed = True
        memory = request.objective == Objective.MEMORY
        best = self._leanest(request.limit) if memory else self.fastest(request.limit)
        if best is not None and request.objective == Objective.PARETO:
            best = self._trade(best)
            self.frontier = [self.simpler(found) for found in self.frontier]
        self.best = None if best is None else self.simpler(best)

    def _conclude(self) -> None:
        """Makes the best so far the answer of a search that was ended, or came to its end with none for want
        of time. Ctrl-C only ends the looking for a better one."""
        self.proven = False
        needed = ANSWERED if self.incumbents.best() is None else 0.0
        with suppress(KeyboardInterrupt):
            grace = (STOPPING if needed else STOPPED) if self.stopped else ANSWERED
            self.request.clock.within(grace, self._last_look, needed)
        self.best = self.best or self.incumbents.best()
        for each in self.problems if self.request.objective == Objective.MEMORY else ():
            self.hold(each)

    def _last_look(self) -> None:
        """Adds evaluated layouts that are no incumbents yet, any layout that fits, and simpler meshes."""
        incumbents, limit = self.incumbents, self.request.limit
        if self.listed and incumbents.best() is None and all(self.hold(p) > limit for p in self.problems):
            self.proven = True
            return
        known = self.request.evaluator.evaluated()
        best_first = sorted(known, key=lambda e: (e[2].memory.peak > limit, e[2].cost.step_seconds))
        for mesh, layout, found in best_first:
            incumbents.offer(mesh, layout, found.options)
        if incumbents.best() is None and self.start is not None:
            incumbents.price_named(self.start, Clock(0.0), self.told)
        if self.request.objective != Objective.MEMORY:
            incumbents.beat_named(limit)
        self.best = (best := incumbents.best()) and self.simpler(best)

    def simpler(self, best: EvaluatedLayout) -> EvaluatedLayout:
        """As good on a mesh with fewer axes, if it was searched."""
        return simplest(best, self.problems, self.request.evaluator) if self.renames else best

    # -- time against memory ---------------------------------------------------------------------------------

    def _trade(self, found: EvaluatedLayout) -> EvaluatedLayout:
        """The frontier: the fastest within less than what the last one holds, and so on; its first point."""
        self.frontier = [found]
        while len(self.frontier) < MOST_POINTS and not self.request.late:
            point = self.fastest(self.frontier[-1].peak - 1)
            if point is None:
                break
            # A point may hold less in the same time.
            while self.frontier and self.frontier[-1].seconds >= point.seconds:
                self.frontier.pop()
            self.frontier.append(point)
        else:
            self.proven = False
        return self.frontier[0]

    def _leanest(self, limit: float) -> EvaluatedLayout | None:
        """Looks for the least peak within `limit`, and for what is fastest there."""
        incumbents, clock = self.incumbents, self.request.clock
        for each in sorted(self.problems, key=lambda p: -p.microbatches):
            if math.isinf(self.hold(each)):
                each.bounds.hold_at_least(math.inf)
                continue
            if self.request.late:
                break
            self.tell(each)
            below = min((f.peak for f in incumbents.found), default=math.inf)
            found, low = least_memory(self.opened(each), min(below, limit + 1), clock)
            each.bounds.hold_at_least(low)
            for layout in found:
                incumbents.add(layout)
        least = min((f.peak for f in incumbents.fitting(limit)), default=math.inf)
        if math.isfinite(least):
            self.fastest(least)
        self.proven = self.least >= min(least, limit + 1)
        return incumbents.best()

    def why(self) -> str:
        """The need of the layout with the least memory, where none fits; sets `nearest`."""
        known = min(self.incumbents.found, key=lambda f: f.peak, default=None)
        problems = [each for each in self.problems if not each.refused]
        self.nearest, ended = nearest_of(self.request, problems, known, self.opened)
        if self.nearest is None:
            return EXCLUDED if ended else f"; {ADVICE.format('more devices')}"
        hold_rows(self.request, self.nearest, self.incumbents.subproblem_of(self.nearest))
        return needed(self.request, self.nearest, self.least, self.renames)

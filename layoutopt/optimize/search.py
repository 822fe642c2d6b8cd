"""All problems of a search, one for every mesh shape, number of microbatches and choice of pipeline stages,
and the best over them.

Every query has one form: which layout is fastest within a number of bytes? Every problem has a bound on its
seconds. The most promising one is solved first; problems whose bound is no better than the best answer are
skipped. Time against memory is this query with less and less memory: an answer holds for every limit from its
own peak up to the queried one, and a bound for every lower limit.

For the least time, a problem is narrowed while its tables are made (`fixing`); time against memory needs
whole problems, which answer for every limit.

The best time of a problem without a memory limit bounds all its layouts, and the best with one option all
that have it. If the hardware's costs satisfy that a piece never costs less than its share of the whole
(`Pricer.pieces_cost_more`), the bound also holds for every multiple of its microbatches (`subproblems`):
their tables are not made, or are made over fewer options. A calibrated machine may be faster in pieces, so
there each is looked at whole.

A search can be ended at any time, by its clock or by Ctrl-C: layouts are stored as they are predicted
(`incumbents`), and bounds as they rise, so the best so far and its bound are always known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from layoutopt.formulation.couplings import count_layouts
from layoutopt.optimize.agreement import hold_rows, rows_said
from layoutopt.optimize.best_plans import held
from layoutopt.optimize.bounds import Bound, Source, State
from layoutopt.optimize.evaluation import Evaluation
from layoutopt.optimize.fixing import ClusterWeights, faster, option_costs
from layoutopt.optimize.incumbents import Incumbents
from layoutopt.optimize.least_memory import least_memory
from layoutopt.optimize.merging import simplest
from layoutopt.optimize.needed import ADVICE, EXCLUDED, nearest_of, needed
from layoutopt.optimize.pace import Pace, looked_at
from layoutopt.optimize.request import ANSWERED, SEARCHED, Request, SearchStatus, uneven
from layoutopt.optimize.subproblem import EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.subproblems import Subproblem, related
from layoutopt.optimize.warm_start import WarmStart
from layoutopt.plan.units import size_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import InfeasibleError, LimitError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import Stage

NAMED_SHARE = 0.25
"""Part of a time limit in which named layouts are predicted before anything is listed or solved."""
STOPPING = 5.0
"""Seconds after Ctrl-C in which named layouts are predicted, if nothing that fits was found yet."""
EVENLY = " with equal shards"
"""Note about layouts with equal shards if other layouts could split further."""
MOST_POINTS = 200
LEAN = 2.0
"""Times the seconds of a layout that does not fit, which it mostly takes at most where it holds least."""


@dataclass
class LayoutSearch:
    """All problems with their bounds, and the layouts that were found.

    Attributes:
      renames: a plan gives the axes of its mesh other names.
      proven: all problems were looked at to the end.
      stopped: Ctrl-C ended it.
      listed: the problems are all there.
      none: why there is no answer, if that is proven.
      nearest: the layout that was found to need least memory, where none fits.
      unsplit: dimensions that had to stay whole (`Extraction.unsplit`).
      weights: approximate costs of clusters, for `faster`.
      start: what is predicted before the problems are listed.
    """

    request: Request
    renames: bool = False
    problems: list[Subproblem] = field(default_factory=list)
    frontier: list[EvaluatedLayout] = field(default_factory=list)
    best: EvaluatedLayout | None = None
    proven: bool = True
    stopped: bool = False
    listed: bool = False
    none: str = ""
    nearest: EvaluatedLayout | None = None
    pace: Pace = field(default_factory=Pace)
    unsplit: dict[str, None] = field(default_factory=dict)
    weights: ClusterWeights = field(default_factory=dict)
    start: WarmStart | None = None

    def __post_init__(self) -> None:
        self.incumbents = Incumbents(self.request, self.renames)

    @property
    def considered(self) -> int:
        """The number of combinations of decisions."""
        return sum(count_layouts(each.decided) for each in self.incumbents.subproblems.values())

    @property
    def least(self) -> float:
        """Bytes that no layout holds less than."""
        return min((each.bounds.least for each in self.problems), default=math.inf)

    def lower(self, limit: float) -> Bound:
        """No layout that holds at most `limit` bytes takes fewer seconds."""
        if not self.listed:
            meshes = (each.mesh.devices for each in self.incumbents.subproblems.values())
            return Bound(self.request.evaluator.alone() / next(meshes, math.inf), Source.SHARE)
        bounds = (each.bounds.lower(limit) for each in self.problems)
        return min(bounds, key=lambda bound: bound.value, default=Bound(math.inf))

    @property
    def bound(self) -> Bound:
        """No layout of the space is better, by the objective."""
        limit, incumbents = self.request.limit, self.incumbents
        if self.request.objective != Objective.MEMORY:
            lower, best = self.lower(limit), incumbents.seconds(limit)
        else:
            lower = Bound(self.least if self.listed else 0.0, Source.TABLES)
            best = min((found.peak for found in incumbents.fitting(limit)), default=math.inf)
        return replace(lower, value=min(lower.value, best))

    def run(self, subproblems: Iterable[Subproblem], keep_best: bool = False) -> EvaluatedLayout:
        """The best layout over all subproblems, or the error with the reason why there is none.

        Args:
          keep_best: Ctrl-C ends the search with the best so far; KeyboardInterrupt if there is none.
        """
        clock = self.request.clock
        try:
            # Where loading took all the time, the problems are listed all the same.
            ended = clock.within(ANSWERED if clock.over else SEARCHED, lambda: self._look(subproblems))
        except KeyboardInterrupt:
            if not keep_best:
                raise
            ended, self.stopped = False, True
            clock.hurry()
        if self.none:
            raise InfeasibleError(self.none)
        if not ended or self.best is None:
            self._conclude()
        if self.best is not None:
            return self.best
        if self.stopped:
            raise KeyboardInterrupt
        raise LimitError(
            "no layout was found within the time limit, so one may or may not fit; raise --time-limit"
        )

    def _look(self, subproblems: Iterable[Subproblem]) -> None:
        """Sets `best`, or `none`."""
        request = self.request
        if self.start is not None:
            self.incumbents.know(self.start)
            if request.clock.limit is not None:
                part = request.clock.part(NAMED_SHARE)
                self.incumbents.price_named(self.start, part, self._tell_first)
        for each in related(subproblems):
            self.problems.append(each)
            self.incumbents.subproblems[each.key] = each
            if self.start is not None:
                self._tell_first("listing subproblems", len(self.problems), len(self.start.specs))
        self.listed = True
        if request.objective == Objective.MEMORY:
            self._leanest(request.limit)
            best = self.incumbents.best()
        else:
            best = self.fastest(request.limit)
        if best is not None and request.objective == Objective.PARETO:
            best = self._trade(best)
            self.frontier = [self.simpler(found) for found in self.frontier]
        self.best = best
        if best is not None:
            self.best = self.simpler(best)
        elif self.proven:
            even = EVENLY if uneven(request, (each.mesh for each in self.problems)) else ""
            self.none = (
                f"no layout of {request.model.name!r}{even} fits into {size_text(request.limit)} per device"
            )
            self.none += self._why() if request.explains else ""
            self.none += f" ({said}: this is not proven)" if (said := rows_said(request)) else ""

    def _conclude(self) -> None:
        """Makes the best so far the answer of a search that was ended, or came to its end with none for want
        of time. Ctrl-C only ends the looking for a better one."""
        self.proven = False
        with suppress(KeyboardInterrupt):
            self.request.clock.within(STOPPING if self.stopped else ANSWERED, self._last_look)
        best = self.incumbents.best()
        if best is not None and self.best is None:
            self.best = best
        if self.listed and self.request.objective == Objective.MEMORY:
            self._hold(self.problems)

    def _hold(self, problems: Iterable[Subproblem]) -> None:
        """Proves that a device holds variables at least."""
        for each in problems:
            each.bounds.hold_at_least(held(self.request.model, each.mesh, each.decided))

    def _last_look(self) -> None:
        """Adds evaluated layouts that are no incumbents yet, any layout that fits, and simpler meshes."""
        incumbents, limit = self.incumbents, self.request.limit

        def best_first(known: tuple[Mesh, Layout, Evaluation]) -> tuple[bool, float]:
            return known[2].memory.peak > limit, known[2].cost.step_seconds

        for mesh, layout, found in sorted(self.request.evaluator.evaluated(), key=best_first):
            incumbents.offer(mesh, layout, found.options)
        if incumbents.best() is None and self.start is not None:
            incumbents.price_named(self.start, Clock(0.0), self._tell_first)
        if self.request.objective != Objective.MEMORY:
            incumbents.beat_named(limit)
        self.best = incumbents.best()
        if self.best is not None:
            self.best = self.simpler(self.best)

    def simpler(self, best: EvaluatedLayout) -> EvaluatedLayout:
        """As good on a mesh with fewer axes, if the shape was searched."""
        if not self.renames or any(isinstance(s, Stage) for s in best.options.storage.values()):
            return best  # what names axes by themselves stays on them
        parts, stages = best.options.microbatches, best.evaluation.pipeline
        alike = (s for s in self.problems if s.microbatches == parts)
        alike = (s for s in alike if s.decided.schedule == best.options.schedule)
        own = (s.mesh for s in alike if s.decided.stages_on(s.mesh) == stages)
        return simplest(best, {mesh.shape: mesh for mesh in own}, self.request.evaluator)

    # -- the fastest -----------------------------------------------------------------------------------------

    def fastest(self, limit: float) -> EvaluatedLayout | None:
        """The fastest layout that holds at most `limit` bytes; sets `proven`."""
        request, incumbents = self.request, self.incumbents
        if len(self.problems) > 1 or request.clock.limit is not None:
            for each in self.problems:  # nothing waits less than not at all
                each.bounds.prove(request.evaluator.least(each.mesh, each.decided), Source.SHARE)
        order = sorted(self.problems, key=lambda each: each.rank)
        if request.clock.limit is not None and not incumbents.fitting(limit):
            order = [*self.problems[-1:], *order]  # what fits most likely, to have something early
        fixes = request.objective == Objective.TIME
        if fixes and order and not incumbents.fitting(limit):
            incumbents.price_on(order[0])
        for each in order:
            self.pace.begin()
            each.inherit(request.evaluator)
            if self._is_open(each, limit):
                self._hold([each])
            if self._is_open(each, limit) and not request.late:
                self._tell(each, each.bounds.lower(limit).value)
                search = self._fixed(each, limit) if fixes else self.opened(each)
                if search is not None and self._is_open(each, limit):
                    self._ask(each, search, limit)
            self.pace.end()
        if self._open(limit):
            self.proven = False
            incumbents.beat_named(limit)
        return incumbents.fastest(limit)

    def _is_open(self, subproblem: Subproblem, limit: float) -> bool:
        """True if something better than the best so far may be in a problem."""
        return subproblem.bounds.state(self.incumbents.seconds(limit), limit) is State.OPEN

    def _open(self, limit: float) -> list[Subproblem]:
        """The problems that something better may be in."""
        best = self.incumbents.seconds(limit)
        return [each for each in self.problems if each.bounds.state(best, limit) is State.OPEN]

    def opened(self, subproblem: Subproblem) -> SubproblemSearch:
        """The whole problem, with all its options."""
        search = subproblem.opened(self.request.evaluator, self.request.clock)
        self.unsplit.update(dict.fromkeys(search.extraction.unsplit))
        return search

    def _fixed(self, subproblem: Subproblem, limit: float) -> SubproblemSearch | None:
        """A problem without what cannot be in anything faster than the best so far; None if nothing is, or
        if there was no time."""
        request, incumbents, bounds = self.request, self.incumbents, subproblem.bounds
        upper = incumbents.seconds(limit)
        narrow = subproblem.narrowed(upper, request.evaluator)
        if narrow is None:
            bounds.prove(upper, Source.TABLES)
            return None

        fits = True

        def propose(layout: Layout, options: Options) -> float:
            nonlocal fits
            if fits or not math.isfinite(incumbents.seconds(limit)):
                found = incumbents.offer(subproblem.mesh, layout, options)
                fits = found is None or found.peak <= limit  # else what is faster does not either, mostly
                if found is not None and not fits and LEAN * found.seconds < incumbents.seconds(limit):
                    incumbents.offer(subproblem.mesh, layout, subproblem.decided.least_memory)
            return incumbents.seconds(limit)

        def told(part: float) -> None:
            self._tell(subproblem, bounds.lower(limit).value, part)

        search = faster(
            request.evaluator, narrow, upper, propose, request.clock, weights=self.weights, told=told
        )
        if search is not None:
            bounds.costs = option_costs(search, subproblem.decided, incumbents.seconds(limit)) or bounds.costs
            self.unsplit.update(dict.fromkeys(search.extraction.unsplit))
        return search

    def _ask(self, subproblem: Subproblem, search: SubproblemSearch, limit: float) -> None:
        """Looks in one problem for something faster than the best so far."""
        best = self.incumbents.seconds(limit)
        upper = best if math.isfinite(best) else None
        outcome = search.fastest(
            limit, upper, self.request.clock, lambda _, bound: self._tell(subproblem, min(bound, best))
        )
        if outcome.found is not None:
            self.incumbents.add(outcome.found)
            if outcome.stopped:
                raise KeyboardInterrupt
            subproblem.bounds.best = outcome.found if outcome.proven else None
        # Without an answer it is proven that nothing here is faster than the best.
        subproblem.bounds.prove(min(outcome.bound, best), Source.SOLVER, limit)

    def _tell_first(self, looked: str, number: int, count: int) -> None:
        """Tells what is done before the first problem is looked at."""
        request, known = self.request, self.incumbents.best()
        if request.on_progress is not None:
            best = math.inf if known is None else self.incumbents.order(known)[0]
            left = request.clock.left
            request.on_progress(SearchStatus(looked, number, count, best, self.bound.value, left))

    def _tell(self, subproblem: Subproblem, bound: float, part: float = 0.0) -> None:
        """Tells how far the whole search is.

        Args:
          bound: seconds that no layout of this problem takes less than, by now.
          part: of its work that is done.
        """
        request = self.request
        if request.on_progress is None:
            return
        known, count = self.incumbents.best(), len(self.problems)
        best = math.inf if known is None else self.incumbents.order(known)[0]
        others = [each for each in self.problems if each is not subproblem]
        if request.objective == Objective.MEMORY:
            others, low = others[len(self.pace.spent) :], self.least
        else:
            others = [each for each in self._open(request.limit) if each is not subproblem]
            low = min([bound, *(each.bounds.lower(request.limit).value for each in others)])
        left = self.pace.left(part, len(others), request.clock.left)
        looked = looked_at(subproblem, self.renames, len(self.frontier))
        low = self.bound.value if self.frontier else low
        request.on_progress(SearchStatus(looked, count - len(others), count, best, min(low, best), left))

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

    def _leanest(self, limit: float) -> None:
        """Looks for the least peak within `limit`, and for what is fastest there."""
        incumbents, clock = self.incumbents, self.request.clock
        for each in sorted(self.problems, key=lambda p: -p.microbatches):
            if self.request.late:
                break
            self.pace.begin()
            self._tell(each, 0.0)
            below = min((f.peak for f in incumbents.found), default=math.inf)
            found, low = least_memory(self.opened(each), min(below, limit + 1), clock)
            each.bounds.hold_at_least(low)
            self._hold([each])
            for layout in found:
                incumbents.add(layout)
            self.pace.end()
        least = min((f.peak for f in incumbents.fitting(limit)), default=math.inf)
        if math.isfinite(least):
            self.fastest(least)
        self.proven = self.least >= min(least, limit + 1)

    def _why(self) -> str:
        """What the layout with the least memory needs; sets `nearest`."""
        known = min(self.incumbents.found, key=lambda f: f.peak, default=None)
        self.nearest, ended = nearest_of(self.request, self.problems, known, self.opened)
        if self.nearest is None:
            return EXCLUDED if ended else ADVICE
        hold_rows(self.request, self.nearest, self.incumbents.subproblem_of(self.nearest))
        return needed(self.request, self.nearest, self.least, self.renames)

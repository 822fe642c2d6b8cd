"""All problems of a search, one for every mesh shape, number of microbatches and choice of pipeline stages,
and the best over them.

Every query has one form: which layout is fastest within a number of bytes? Every problem has a bound on its
seconds. The most promising one is solved first; problems whose bound is no better than the best answer are
skipped. Time against memory is this query with less and less memory: an answer holds for every limit from its
own peak up to the queried one, and a bound for every lower limit.

For the least time, a problem is narrowed while its tables are made (`fixing`); time against memory needs
whole problems, which answer for every limit. Bounds also hold for multiples of a problem's microbatches
(`Subproblem.inherit`).

A search can be ended at any time, by its clock or by Ctrl-C: layouts are stored as they are predicted
(`incumbents`), and bounds as they rise, so the best so far and its bound are always known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from layoutopt.optimize.agreement import hold_rows
from layoutopt.optimize.best_plans import held
from layoutopt.optimize.bounds import Bound, Source, State
from layoutopt.optimize.evaluator import Evaluator
from layoutopt.optimize.fixing import ClusterWeights, faster, option_costs
from layoutopt.optimize.incumbents import Incumbents
from layoutopt.optimize.layer_bounds import LayerBounds
from layoutopt.optimize.least_memory import least_memory
from layoutopt.optimize.merging import simplest
from layoutopt.optimize.needed import ADVICE, EXCLUDED, nearest_of, needed
from layoutopt.optimize.request import ANSWERED, SEARCHED, Request, SearchStatus, uneven
from layoutopt.optimize.subproblem import EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.subproblems import Subproblem
from layoutopt.optimize.warm_start import WarmStart
from layoutopt.plan.units import size_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.allow import USUAL
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import InfeasibleError, LimitError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options

NAMED_SHARE = 0.25
"""Part of a time limit in which named layouts are predicted before anything is listed or solved."""
STOPPING, STOPPED = 5.0, 0.4
"""Seconds after Ctrl-C for predicting named layouts, if nothing that fits is known, else for any work."""
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
      called: its space, in a word, if it is one of several.
      after: the search from whose results it goes on.
      seconds: from the start of the request's clock to its end.
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
    unsplit: dict[str, None] = field(default_factory=dict)
    weights: dict[Evaluator, ClusterWeights] = field(default_factory=lambda: defaultdict(dict))
    start: WarmStart | None = None
    called: str = ""
    after: LayoutSearch | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.incumbents = Incumbents(self.request, self.renames)
        if self.after is not None:
            self.incumbents.found += self.after.incumbents.found
            self.incumbents.subproblems |= self.after.incumbents.subproblems
        self.layers = LayerBounds(self.request.evaluator)

    @property
    def considered(self) -> int:
        """The number of combinations of decisions."""
        if self.after is not None and not self.listed:
            return self.after.considered
        return sum(each.layouts for each in self.incumbents.subproblems.values())

    @property
    def least(self) -> float:
        """Bytes that no layout holds less than."""
        return min((each.bounds.least for each in self.problems), default=math.inf)

    def lower(self, limit: float) -> Bound:
        """No layout that holds at most `limit` bytes takes fewer seconds."""
        if not self.listed:
            meshes = (each.mesh.devices for each in self.incumbents.subproblems.values())
            return Bound(self.request.evaluator.alone() / next(meshes, math.inf), Source.SHARE)
        every = (each.bounds.lower(limit) for each in self.problems)
        return min(every, key=lambda bound: bound.value, default=Bound(math.inf))

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
            grace, needed = (ANSWERED,) * 2 if clock.over else (SEARCHED, 0.0)  # loading took all the time
            ended = clock.within(grace, lambda: self._look(subproblems), needed)
        except KeyboardInterrupt:
            if not keep_best:
                raise
            ended, self.stopped = False, True
            clock.hurry()
            with suppress(KeyboardInterrupt):
                self.told("stopping")
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
            self._hold(each)

    def _hold(self, of: Subproblem) -> float:
        """Proves that a device holds variables at least; bytes that no layout of the problem holds less."""
        if of.refused:
            of.bounds.prove(math.inf, Source.REFUSED)
            return math.inf
        of.bounds.hold_at_least(held(self.request.model, of.mesh, of.decided))
        return of.bounds.least

    def _last_look(self) -> None:
        """Adds evaluated layouts that are no incumbents yet, any layout that fits, and simpler meshes."""
        incumbents, limit = self.incumbents, self.request.limit
        if self.listed and incumbents.best() is None and all(self._hold(p) > limit for p in self.problems):
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

    # -- the fastest -----------------------------------------------------------------------------------------

    def fastest(self, limit: float) -> EvaluatedLayout | None:
        """The fastest layout that holds at most `limit` bytes; sets `proven`."""
        request, incumbents = self.request, self.incumbents
        if len(self.problems) > 1 or request.clock.limit is not None:
            for each in self.problems:  # nothing waits less than not at all
                each.bound_by_share(request.evaluator)
        if fixes := request.objective == Objective.TIME:
            incumbents.answer_named(limit, self.problems, self._tell)
        for number, each in enumerate(self._in_order(limit)):
            each.inherit(request.evaluator)
            if self.incumbents.is_open(each, limit):
                self._hold(each)
            if not number and fixes and not incumbents.fitting(limit) and not each.refused:
                incumbents.price_on(each)
            if self.incumbents.is_open(each, limit) and not request.late:
                self._tell(each)
                for evaluator in incumbents.sides(each, limit, fixes):
                    search = self._fixed(each, limit, evaluator) if fixes else self.opened(each)
                    if search is not None:
                        self._ask(each, search, limit)
        if self._open(limit):
            self.proven = False
            incumbents.beat_named(limit)
        return incumbents.fastest(limit)

    def _in_order(self, limit: float) -> Iterator[Subproblem]:
        """The problems without stages first, by their bounds: what is found there closes most of the others
        before they have a graph. Before all, that of the best known, and what is near it in other graphs.
        Within a time limit the others are bounded once something fits: the gap is that of the least bound."""
        limited, staged = self.request.clock.limit is not None, [p for p in self.problems if p.key.stages]
        if limited and self.incumbents.fastest(limit) is None:
            yield from self.problems[-1:]  # what fits most likely
        if (known := self.incumbents.fastest(limit)) is not None:
            yield self.incumbents.subproblem_of(known)
            self.incumbents.spread(limit, staged, self.request.clock.part(NAMED_SHARE))
        self._bound(staged if limited else (), limit)
        yield from sorted((each for each in self.problems if not each.key.stages), key=lambda p: p.rank)
        self._bound(() if limited else staged, limit)
        for each in sorted(staged, key=lambda p: p.rank):
            if self.incumbents.is_open(each, limit) and not self.request.late:
                self.layers.prove(each, self.incumbents.seconds(limit))
            yield each

    def _bound(self, problems: Sequence[Subproblem], limit: float) -> None:
        """Bounds problems with stages by their layers, from few tables, in a part of the time."""
        part, told = self.request.clock.part(NAMED_SHARE), None
        for each in problems:
            if self.incumbents.is_open(each, limit) and not part.over:
                if told is not (told := each.unstaged):  # the others have the same tables
                    self._tell(each)
                self.layers.prove(each, self.incumbents.seconds(limit), shortly=True)

    def _open(self, limit: float) -> list[Subproblem]:
        """The problems that something better may be in."""
        best = self.incumbents.seconds(limit)
        return [each for each in self.problems if each.bounds.state(best, limit) is State.OPEN]

    def opened(self, subproblem: Subproblem) -> SubproblemSearch:
        """The whole problem, with all its options."""
        search = subproblem.opened(self.request.evaluator, self.request.clock)
        self.unsplit.update(dict.fromkeys(search.extraction.unsplit))
        return search

    def _fixed(self, subproblem: Subproblem, limit: float, by: Evaluator) -> SubproblemSearch | None:
        """A problem, by some tables, without what nothing faster than the best has; None if all, or late."""
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
                if found and not fits and LEAN * found.seconds < incumbents.seconds(limit):
                    incumbents.offer(subproblem.mesh, layout, subproblem.decided.least_memory)
            return incumbents.seconds(limit)

        asked = by, narrow, upper, propose, request.clock, self.weights[by]
        search = faster(*asked, told=lambda part: self._tell(subproblem, part=part))
        if search is not None:
            bounds.costs = option_costs(search, subproblem.decided, incumbents.seconds(limit)) or bounds.costs
            self.unsplit.update(dict.fromkeys(search.extraction.unsplit))
        return search

    def _ask(self, subproblem: Subproblem, search: SubproblemSearch, limit: float) -> None:
        """Looks in one problem for something faster than the best so far."""
        best = self.incumbents.seconds(limit)
        outcome = search.fastest(
            limit, best, self.request.clock, lambda _, bound: self._tell(subproblem, min(bound, best))
        )
        if (found := outcome.found) is not None:
            self.incumbents.add(found)
            if outcome.stopped:
                raise KeyboardInterrupt
            longer = bool(found.evaluation.cost.host_seconds) == (search.evaluator.of is not None)
            subproblem.bounds.best = found if outcome.proven and longer else None
        # Without an answer it is proven that nothing here is faster than the best.
        subproblem.bounds.prove(min(outcome.bound, best), Source.SOLVER, limit)

    def told(
        self, looked: str, number: int = 0, count: int = 0, low: float | None = None, part: float = 0.0
    ) -> None:
        """Tells how far it is; `low`: by default, the bound of the whole."""
        if (tell := self.request.on_progress) is None:
            return
        known, low = self.incumbents.best(), self.bound.value if low is None else low
        best = math.inf if known is None else self.incumbents.order(known)[0]
        at = (number, count) if count else (len(self.problems),) * 2
        tell(SearchStatus(looked, *at, best, min(low, best), part, self.called))

    def _tell(self, subproblem: Subproblem, bound: float = 0.0, part: float = 0.0) -> None:
        """Tells how far the whole search is, with a solver's bound of this problem, and its finished part."""
        request, count = self.request, len(self.problems)
        if request.on_progress is None:
            return
        if request.objective == Objective.MEMORY:
            others, low = [p for p in self.problems if p is not subproblem and not p.bounds.least], self.least
        else:
            others = [each for each in self._open(request.limit) if each is not subproblem]
            known = max(bound, subproblem.bounds.lower(request.limit).value)
            low = min([known, *(each.bounds.lower(request.limit).value for each in others)])
        looked = subproblem.words(self.renames, len(self.frontier))
        self.told(looked, count - len(others), count, None if self.frontier else low, part)

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
            if math.isinf(self._hold(each)):
                each.bounds.hold_at_least(math.inf)
                continue
            if self.request.late:
                break
            self._tell(each)
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

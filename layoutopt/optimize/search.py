"""All problems of a search, one for every mesh shape, number of microbatches and way to have
stages of pipelines, and the best over them.

A question is always the same: what is fastest within some bytes? Every problem has a bound on its seconds;
the one that promises most is asked first, and what promises no more than the best answer so far is not asked
at all. Time against memory is this question with less and less memory: an answer holds for every limit from
its own peak up to the one that was asked about, and a bound for every lower limit.

Asked for the least time, a problem is narrowed while its tables are made (`fixing`); time against memory
needs whole problems, which answer for every limit.

The best time of a problem without a memory limit bounds all its layouts, and the best with one option all
that have it. Where the hardware's prices say that a piece never costs less than its share of the whole
(`Pricer.pieces_cost_more`), that holds for every multiple of its microbatches too (`candidates`): their
tables are not even made, or over fewer options. A calibrated machine may be faster in pieces, so there each
is looked at whole.

A search can be ended anywhere, by its clock or by Ctrl-C: layouts are kept as they are priced
(`incumbents`), and bounds as they rise, so that the best so far and what is proven of it are always known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from layoutopt.formulation.extract import count_layouts
from layoutopt.optimize.candidates import MicrobatchBounds, SubproblemCandidate, compute_at_least
from layoutopt.optimize.fixing import ClusterWeights, OptionCosts, faster, option_costs
from layoutopt.optimize.incumbents import Incumbents
from layoutopt.optimize.least_memory import leanest, least_memory, too_much
from layoutopt.optimize.merging import simplest
from layoutopt.optimize.pace import Pace, looked_at
from layoutopt.optimize.request import ANSWERED, BESIDE, SEARCHED, Request, SearchStatus, space_of, uneven
from layoutopt.optimize.restricted import held, lean
from layoutopt.optimize.subproblem import EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.subproblems import Subproblem
from layoutopt.plan.units import size_text
from mesh_tf_core.errors import InfeasibleError, LimitError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import Stage

NAMED_SHARE = 0.25
"""Part of a time limit in which layouts by name are priced before anything is solved."""
STOPPING = 5.0
"""Seconds after Ctrl-C in which layouts by name are priced, if nothing that fits was found yet."""
EVENLY = " whose shards divide evenly"
"""Said of the layouts that are looked at where others could split more."""
MOST_POINTS = 200
LEAN = 2.0
"""Times the seconds of a layout that does not fit, which it mostly takes at most where it holds least."""


@dataclass
class LayoutSearch:
    """The bounds of all problems, and the layouts that were found.

    Attributes:
      renames: a plan gives the axes of its mesh other names.
      bound: of the objective, for all layouts that were asked for.
      proven: all problems were looked at to the end.
      stopped: Ctrl-C ended it.
      pieces: what holds for multiples of a number of microbatches.
      listed: the candidates are all there.
      asked: the problem that is being looked at.
      none: why there is no answer, if that is proven.
      nearest: the layout that was found to need least memory, where none fits.
      unsplit: dimensions that had to stay whole (`Extraction.unsplit`).
      weights: what clusters cost about, for `faster`.
    """

    request: Request
    renames: bool = False
    candidates: list[SubproblemCandidate] = field(default_factory=list)
    frontier: list[EvaluatedLayout] = field(default_factory=list)
    best: EvaluatedLayout | None = None
    bound: float = math.inf
    proven: bool = True
    stopped: bool = False
    pieces: MicrobatchBounds = field(default_factory=MicrobatchBounds)
    listed: bool = False
    asked: SubproblemSearch | None = None
    none: str = ""
    nearest: EvaluatedLayout | None = None
    pace: Pace = field(default_factory=Pace)
    unsplit: dict[str, None] = field(default_factory=dict)
    weights: ClusterWeights = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.incumbents = Incumbents(self.request, self.renames)

    @property
    def considered(self) -> int:
        """The number of combinations of decisions."""
        return sum(count_layouts(candidate.subproblem.decided.options) for candidate in self.candidates)

    def run(self, subproblems: Iterable[Subproblem], keep_best: bool = False) -> EvaluatedLayout:
        """The best layout over all subproblems, or the error that says why there is none.

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
        raise LimitError("nothing was found in the time given; raise --time-limit")

    def _look(self, subproblems: Iterable[Subproblem]) -> None:
        """Sets `best`, or `none`."""
        request = self.request
        for subproblem in subproblems:
            self.candidates.append(SubproblemCandidate(subproblem))
            self.incumbents.subproblems.append(subproblem)
        self.listed = True
        if request.clock.left is not None:
            self.incumbents.price_named(request.clock.part(NAMED_SHARE))
        if request.objective == "memory":
            self._leanest(request.limit)
            best = self.incumbents.best()
        else:
            best = self._fastest(request.limit)
        if best is not None and request.objective == "pareto":
            best = self._trade(best)
            self.frontier = [self.simpler(found) for found in self.frontier]
        self.best = best
        if best is not None:
            self.best = self.simpler(best)
        elif self.proven:
            even = EVENLY if uneven(request, (c.subproblem.mesh for c in self.candidates)) else ""
            self.none = (
                f"no layout of {request.model.name!r}{even} fits into {size_text(request.limit)} a device"
            )
            self.none += self._needed() if request.explains else ""

    def _conclude(self) -> None:
        """Makes the best so far the answer of a search that was ended, or came to its end with none for want
        of time. Ctrl-C only ends the looking for a better one."""
        self.proven = False
        limit, memory = self.request.limit, self.request.objective == "memory"
        with suppress(KeyboardInterrupt):
            self.request.clock.within(STOPPING if self.stopped else ANSWERED, self._last_look)
        best = self.incumbents.best()
        if best is not None and self.best is None:
            self.best = best
        if not self.listed:
            self.bound = 0.0
        elif memory:
            self.bound = min(max(c.low, self._held(c.subproblem)) for c in self.candidates)
        else:
            bounds = [candidate.bound for candidate in self.candidates if candidate.low <= limit]
            self.bound = min([self.bound, *bounds])

    def _held(self, subproblem: Subproblem) -> float:
        """Bytes of variables that a device holds at least."""
        return held(self.request.model, subproblem.mesh, subproblem.decided)

    def _last_look(self) -> None:
        """Adds evaluated layouts that are no incumbents yet, any layout that fits, and simpler meshes."""
        incumbents = self.incumbents
        evaluated = self.asked.every_evaluated() if self.asked is not None else ()
        for found in sorted(evaluated, key=lambda f: (f.peak > self.request.limit, *incumbents.order(f))):
            incumbents.add(found)  # the best first
        if incumbents.best() is None:
            incumbents.price_named()
        if self.request.objective != "memory":
            incumbents.beat_named(self.request.limit)
        self.best = incumbents.best()
        if self.best is not None:
            self.best = self.simpler(self.best)

    def simpler(self, best: EvaluatedLayout) -> EvaluatedLayout:
        """As good on a mesh with fewer axes, if the shape was searched."""
        if not self.renames or any(isinstance(s, Stage) for s in best.options.storage.values()):
            return best  # what names axes by themselves stays on them
        parts, stages = best.options.microbatches, best.evaluation.pipeline
        alike = (c.subproblem for c in self.candidates if c.subproblem.microbatches == parts)
        alike = (s for s in alike if s.decided.schedule == best.options.schedule)
        own = (s.mesh for s in alike if s.decided.stages_on(s.mesh) == stages)
        return simplest(best, {mesh.shape: mesh for mesh in own}, self.request.evaluator)

    # -- the fastest -----------------------------------------------------------------------------------------

    def _fastest(self, limit: float) -> EvaluatedLayout | None:
        """The fastest layout that holds at most `limit` bytes; sets `bound` and `proven`."""
        request, incumbents = self.request, self.incumbents
        if len(self.candidates) > 1 or request.clock.limit is not None:
            compute_at_least(self.candidates, request.evaluator)
        order = sorted(self.candidates, key=lambda p: p.rank)
        if request.clock.limit is not None and not incumbents.fitting(limit):
            order = [*self.candidates[-1:], *order]  # what fits most likely, to have something early
        fixes = request.objective == "time"
        if fixes and order and not incumbents.fitting(limit):
            incumbents.price_on(order[0].subproblem)
        for candidate in order:
            self.pace.begin()
            best = incumbents.seconds(limit)
            candidate.bound = max(candidate.bound, self.pieces.bound(candidate.subproblem))
            if candidate.promises(best, limit):
                candidate.low = max(candidate.low, self._held(candidate.subproblem))
            if candidate.promises(best, limit) and not request.late:
                self._tell(candidate, candidate.bound)
                search = self._fixed(candidate, limit) if fixes else self.opened(candidate)
                best = incumbents.seconds(limit)
                if search is not None and candidate.promises(best, limit):
                    self._ask(candidate, search, limit, best)
            self.pace.end()
        if any(candidate.promises(incumbents.seconds(limit), limit) for candidate in self.candidates):
            self.proven = False
            incumbents.beat_named(limit)
        bounds = [candidate.bound for candidate in self.candidates if candidate.low <= limit]
        self.bound = min([self.bound, incumbents.seconds(limit), *bounds])
        return incumbents.fastest(limit)

    def opened(self, candidate: SubproblemCandidate) -> SubproblemSearch:
        """The whole problem of a candidate."""
        if candidate.search is None:
            subproblem, request = candidate.subproblem, self.request
            candidate.search = SubproblemSearch(
                request.model,
                subproblem.mesh,
                subproblem.decided,
                request.hardware,
                evaluator=request.evaluator,
            )
            self.unsplit.update(dict.fromkeys(candidate.search.extraction.unsplit))
            self._bounded(candidate, candidate.search.relaxed(request.clock))
        return candidate.search

    def _bounded(
        self, candidate: SubproblemCandidate, seconds: float, costs: OptionCosts | None = None
    ) -> None:
        """No layout of a candidate takes less, whatever memory it takes; `costs`: with each option."""
        candidate.bound = max(candidate.bound, seconds)
        if self.request.evaluator.prices(candidate.subproblem.mesh).pieces_cost_more:
            self.pieces.keep(candidate.subproblem, seconds, costs)

    def _fixed(self, candidate: SubproblemCandidate, limit: float) -> SubproblemSearch | None:
        """A candidate without what cannot be in anything faster than the best so far; None if nothing is, or
        if there was no time."""
        subproblem, request, incumbents = candidate.subproblem, self.request, self.incumbents
        upper = incumbents.seconds(limit)
        narrow = self.pieces.narrowed(subproblem, upper)
        if narrow is None:
            self._bounded(candidate, upper)
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

        def heard(bound: float, part: float) -> None:
            self._bounded(candidate, min(bound, upper))
            self._tell(candidate, candidate.bound, part)

        bound, search = faster(
            request.evaluator, narrow, upper, propose, request.clock, weights=self.weights, heard=heard
        )
        known = incumbents.seconds(limit)
        costs = None if search is None else option_costs(search, subproblem.decided, known)
        self._bounded(candidate, min(bound, upper), costs)
        if search is not None:
            self.unsplit.update(dict.fromkeys(search.extraction.unsplit))
        return search

    def _ask(
        self, candidate: SubproblemCandidate, search: SubproblemSearch, limit: float, best: float
    ) -> None:
        """Looks in one candidate for something faster than the best so far."""
        upper, self.asked = best if math.isfinite(best) else None, search
        outcome = search.fastest(
            limit, upper, self.request.clock, lambda _, bound: self._tell(candidate, min(bound, best))
        )
        if outcome.found is not None:
            self.incumbents.add(outcome.found)
            if outcome.found.solution.stopped:
                raise KeyboardInterrupt
            candidate.answer = outcome.found if outcome.proven else None
        # Without an answer it is proven that nothing here is faster than the best.
        candidate.bound = max(candidate.bound, min(outcome.bound, best))

    def _tell(self, candidate: SubproblemCandidate, bound: float, part: float = 0.0) -> None:
        """Tells how far the whole search is.

        Args:
          bound: seconds that no layout of this candidate takes less than, by now.
          part: of its work that is done.
        """
        request = self.request
        if request.on_progress is None:
            return
        known, count = self.incumbents.best(), len(self.candidates)
        best = math.inf if known is None else self.incumbents.order(known)[0]
        others = [c for c in self.candidates if c is not candidate]
        if request.objective == "memory":
            others, bound = others[len(self.pace.spent) :], candidate.low
            bounds = [c.low for c in self.candidates]
        else:
            others = [c for c in others if c.promises(best, request.limit)]
            bounds = [c.bound for c in others]
        left = self.pace.left(part, len(others), request.clock.left)
        looked = looked_at(candidate.subproblem, self.renames, len(self.frontier))
        low = self.bound if self.frontier else min([bound, *bounds])
        request.on_progress(SearchStatus(looked, count - len(others), count, best, min(low, best), left))

    def subproblem_of(self, found: EvaluatedLayout) -> Subproblem:
        """The decisions of the subproblem where a layout was found."""
        return self.incumbents.subproblem_of(found)

    # -- time against memory ---------------------------------------------------------------------------------

    def _trade(self, found: EvaluatedLayout) -> EvaluatedLayout:
        """The frontier: the fastest within less than what the last one holds, and so on; its first point."""
        bound, self.frontier = self.bound, [found]
        while len(self.frontier) < MOST_POINTS and not self.request.late:
            point = self._fastest(self.frontier[-1].peak - 1)
            if point is None:
                break
            # A point may hold less in the same time.
            while self.frontier and self.frontier[-1].seconds >= point.seconds:
                self.frontier.pop()
            self.frontier.append(point)
        else:
            self.proven = False
        self.bound = bound
        return self.frontier[0]

    def _leanest(self, limit: float) -> None:
        """The least peak within `limit`, and what is fastest there; `bound` is in bytes."""
        incumbents, clock = self.incumbents, self.request.clock
        for candidate in sorted(self.candidates, key=lambda p: -p.subproblem.microbatches):
            if self.request.late:
                break
            self.pace.begin()
            self._tell(candidate, candidate.low)
            below = min((f.peak for f in incumbents.found), default=math.inf)
            self.asked = self.opened(candidate)
            found, low = least_memory(self.asked, min(below, limit + 1), clock)
            candidate.low = max(low, self._held(candidate.subproblem))
            for each in found:
                incumbents.add(each)
            self.pace.end()
        least = min((f.peak for f in incumbents.fitting(limit)), default=math.inf)
        low = min((candidate.low for candidate in self.candidates), default=math.inf)
        if math.isfinite(least):
            self._fastest(least)
        self.proven = low >= min(least, limit + 1)
        self.bound = min(low, least)

    def _needed(self) -> str:
        """The least memory that a layout needs, what of it is proven, and what fills it."""
        request, known = self.request, [*self.incumbents.found]

        def look() -> None:
            for candidate in self.candidates:
                if candidate.low > request.limit:  # known without tables, which may take long
                    known.extend(filter(None, [lean(request, candidate.subproblem)]))
            for candidate in self.candidates:
                found, low = leanest(self.opened(candidate), request.clock)
                candidate.low = max(candidate.low, low)
                known.extend([found] if found is not None else [])

        with request.clock.at_most(BESIDE):
            ended = request.clock.within(0.0, look)
        nearest = self.nearest = min(known, key=lambda f: f.peak, default=None)
        advice = "; use more devices or more memory, or a smaller batch"
        if nearest is None:
            return ": the pins and prohibitions allow no legal layout; drop one of them" if ended else advice
        low = max(request.limit, min(candidate.low for candidate in self.candidates))
        shapes = {each.subproblem.mesh.shape for each in self.candidates} if self.renames else None
        space = space_of(request, nearest.mesh, self.considered, shapes)
        return too_much(request, nearest, low, advice, space)

"""All problems of a search, one for every mesh shape and number of microbatches, and the best over them.

A question is always the same: what is fastest within some bytes? Every problem has a bound on its seconds;
the one that promises most is asked first, and what promises no more than the best answer so far is not asked
at all. Time against memory is this question with less and less memory: an answer holds for every limit from
its own peak up to the one that was asked about, and a bound for every lower limit.

Asked for the least time, a problem is narrowed while its tables are made (`fixing`); time against memory
needs whole problems, which answer for every limit.

The best time of a problem without a memory limit bounds all its layouts. Where the hardware's prices say that
a piece never costs less than its share of the whole (`Pricer.pieces_cost_more`), that holds for every larger
number of microbatches too, and their tables are not even made; a calibrated machine may be faster in pieces,
so there each is looked at.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from layoutopt.evaluator import Evaluation
from layoutopt.formulation.extract import count_layouts
from layoutopt.optimize.baselines import axis_names, by_name
from layoutopt.optimize.fixing import faster
from layoutopt.optimize.heuristics import greedy
from layoutopt.optimize.merging import merged
from layoutopt.optimize.request import EXACT, Request
from layoutopt.optimize.subproblem import Found, SubproblemSearch
from layoutopt.optimize.subproblems import Subproblem
from layoutopt.plan.build import decided
from layoutopt.plan.units import size_text
from layoutopt.problem import Solution, Status
from layoutopt.space.decisions import Decisions
from mesh_tf_core.errors import InfeasibleError, LayoutError, LimitError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options

NAMED_SHARE = 0.25
"""Part of a time limit in which layouts by name are priced before anything is solved."""
STOPPING = 5.0
"""Seconds after Ctrl-C in which layouts by name are priced, if nothing that fits was found yet."""
MOST_POINTS = 200


@dataclass
class Candidate:
    """One problem of the search, and what is proven of it.

    Attributes:
      bound: seconds that no layout takes less of, within the last limit that was asked about or a lower one.
      low: bytes that no layout goes below.
      answer: the fastest within that limit.
    """

    subproblem: Subproblem
    search: SubproblemSearch | None = None
    bound: float = 0.0
    low: float = 0.0
    answer: Found | None = None

    def promises(self, seconds: float, limit: float) -> bool:
        """Whether something faster may be here that holds at most `limit` bytes."""
        known = self.answer is not None and self.answer.peak <= limit
        return not known and self.low <= limit and self.bound < seconds * (1 - EXACT)


@dataclass
class Search:
    """Every layout found so far, and what is proven about all problems.

    Attributes:
      renames: a plan gives the axes of its mesh other names.
      bound: of the objective, for all layouts that were asked for.
      least: of a mesh and a number of microbatches, seconds that no layout of these is faster than, nor of
        a multiple of the microbatches.
      asked: the problem that is being looked at.
    """

    request: Request
    renames: bool = False
    candidates: list[Candidate] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    frontier: list[Found] = field(default_factory=list)
    best: Found | None = None
    bound: float = math.inf
    proven: bool = True
    least: dict[tuple[Mesh, int], float] = field(default_factory=dict)
    asked: SubproblemSearch | None = None

    @property
    def considered(self) -> int:
        """How many combinations of decisions there are."""
        return sum(count_layouts(candidate.subproblem.decided.options) for candidate in self.candidates)

    def run(self, subproblems: Iterable[Subproblem]) -> Found:
        """The best layout over all subproblems, or the error that says why there is none."""
        request = self.request
        self.candidates = [Candidate(subproblem) for subproblem in subproblems]
        if request.deadline is not None:
            started = time.monotonic()
            self._try_named(started + NAMED_SHARE * (request.deadline - started))
        if request.objective == "memory":
            self._leanest(request.limit)
            self.best = min(self._fitting(request.limit), key=lambda f: (f.peak, f.seconds), default=None)
        else:
            self.best = self._fastest(request.limit)
        if self.best is not None and request.objective == "pareto":
            self._trade(self.best)
            self.frontier = [self.simpler(found) for found in self.frontier]
        if self.best is not None:
            return self.simpler(self.best)
        if not self.proven:
            raise LimitError("nothing was found in the time given; raise --time-limit")
        raise InfeasibleError(self._infeasible())

    def simpler(self, best: Found) -> Found:
        """As good on a mesh with fewer axes, if the shape was searched."""
        if not self.renames:
            return best
        evaluator = self.request.evaluator

        def evaluate(mesh: Mesh, layout: Layout) -> Evaluation:
            return evaluator(mesh, layout, best.options)

        parts = best.options.microbatches
        own = (c.subproblem.mesh for c in self.candidates if c.subproblem.microbatches == parts)
        mesh, layout = merged(best.mesh, best.layout, {mesh.shape: mesh for mesh in own}, evaluate)
        if mesh == best.mesh:
            return best
        return replace(best, mesh=mesh, layout=layout, evaluation=evaluate(mesh, layout))

    def hurry(self) -> float:
        """Leaves no more time from now on, which it returns."""
        now = time.monotonic()
        self.request = replace(self.request, deadline=now)
        return now

    def stopped(self) -> Found:
        """The best layout so far, of a search that Ctrl-C ended; KeyboardInterrupt if there is none.

        Ctrl-C once more only ends the looking for a better one.
        """
        now, self.proven = self.hurry(), False
        limit, memory = self.request.limit, self.request.objective == "memory"

        def order(found: Found) -> tuple[float, float]:
            return (found.peak, found.seconds) if memory else (found.seconds, found.peak)

        with contextlib.suppress(KeyboardInterrupt):
            evaluated = self.asked.every_evaluated() if self.asked is not None else ()
            for found in sorted(evaluated, key=lambda f: (f.peak > limit, *order(f))):  # the best first
                self._add(found)
            if not self._fitting(limit):
                self._try_named(now + STOPPING)
            if not memory:
                self._beat_named(limit)
        fitting = self._fitting(limit)
        if not fitting:
            raise KeyboardInterrupt
        self.best = best = min(fitting, key=order)
        if memory:
            self.bound = min(candidate.low for candidate in self.candidates)
        else:
            self.bound = min(self.bound, *(candidate.bound for candidate in self.candidates))
        with contextlib.suppress(KeyboardInterrupt):
            best = self.simpler(best)
        return best

    def _add(self, found: Found) -> None:
        """Keeps a layout, and tells of it if it is the best so far that fits."""
        request, memory = self.request, self.request.objective == "memory"
        known = [f.peak if memory else f.seconds for f in self._fitting(request.limit)]
        value = found.peak if memory else found.seconds
        self.found.append(found)
        if request.on_better and found.peak <= request.limit and value < min(known, default=math.inf):
            request.on_better(_in_words(found), found.seconds, found.peak)

    def _fitting(self, limit: float) -> list[Found]:
        return [f for f in self.found if f.peak <= limit]

    def _late(self) -> bool:
        return self.request.deadline is not None and time.monotonic() > self.request.deadline

    # -- the fastest -----------------------------------------------------------------------------------------

    def _fastest(self, limit: float) -> Found | None:
        """The fastest layout that holds at most `limit` bytes; sets `bound` and `proven`."""
        order = sorted(self.candidates, key=lambda p: p.bound)
        if self.request.deadline is not None and not self._fitting(limit):
            order = [*self.candidates[-1:], *order]  # what fits most likely, to have something early
        fixes = self.request.objective == "time"
        for candidate in order:
            best = self._known(limit)
            self._inherit(candidate)
            if candidate.promises(best, limit) and not self._late():
                search = self._fixed(candidate, limit) if fixes else self.opened(candidate)
                best = self._known(limit)
                if search is not None and candidate.promises(best, limit):
                    self._ask(candidate, search, limit, best)
        if any(candidate.promises(self._known(limit), limit) for candidate in self.candidates):
            self.proven = False
            self._beat_named(limit)
        bounds = [candidate.bound for candidate in self.candidates if candidate.low <= limit]
        self.bound = min([self.bound, self._known(limit), *bounds])
        return self._fastest_known(limit)

    def _fastest_known(self, limit: float) -> Found | None:
        return min(self._fitting(limit), key=lambda f: (f.seconds, f.peak), default=None)

    def _known(self, limit: float) -> float:
        found = self._fastest_known(limit)
        return math.inf if found is None else found.seconds

    def _inherit(self, candidate: Candidate) -> None:
        """What is known of fewer microbatches holds for a multiple of them."""
        own = candidate.subproblem
        known = (t for (m, whole), t in self.least.items() if m == own.mesh and own.microbatches % whole == 0)
        candidate.bound = max([candidate.bound, *known])

    def opened(self, candidate: Candidate) -> SubproblemSearch:
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
            self._bounded(candidate, candidate.search.relaxed(request.deadline))
        return candidate.search

    def _bounded(self, candidate: Candidate, seconds: float) -> None:
        """No layout of a candidate takes less, whatever memory it takes."""
        candidate.bound = max(candidate.bound, seconds)
        if self.request.evaluator.prices(candidate.subproblem.mesh).pieces_cost_more:
            self.least[candidate.subproblem.mesh, candidate.subproblem.microbatches] = candidate.bound

    def _fixed(self, candidate: Candidate, limit: float) -> SubproblemSearch | None:
        """A candidate without what cannot be in anything faster than the best so far; None if nothing is, or
        if there was no time."""
        subproblem, request, upper = candidate.subproblem, self.request, self._known(limit)

        def propose(layout: Layout, options: Options) -> float:
            self._try(subproblem.mesh, layout, options)
            if not math.isfinite(self._known(limit)):
                self._try(subproblem.mesh, layout, subproblem.decided.leanest)
            return self._known(limit)

        bound, search = faster(request.evaluator, subproblem, upper, propose, request.deadline)
        self._bounded(candidate, min(bound, upper))
        return search

    def _ask(self, candidate: Candidate, search: SubproblemSearch, limit: float, best: float) -> None:
        """Looks in one candidate for something faster than the best so far."""
        upper, self.asked = best if math.isfinite(best) else None, search
        outcome = search.fastest(
            limit, upper, self.request.deadline, lambda a, b: self._tell(candidate.subproblem.mesh, a, b)
        )
        if outcome.found is not None:
            self._add(outcome.found)
            if outcome.found.solution.stopped:
                raise KeyboardInterrupt
            candidate.answer = outcome.found if outcome.proven else None
        # Without an answer it is proven that nothing here is faster than the best.
        candidate.bound = max(candidate.bound, min(outcome.bound, best))

    def _tell(self, mesh: Mesh, best: float, bound: float) -> None:
        if self.request.on_progress:
            known = self._known(self.request.limit)
            self.request.on_progress(str(mesh), min(best, known), min(bound, known))

    def subproblem_of(self, found: Found) -> Subproblem:
        """What is decided where a layout was found."""
        return self._candidate_of(found).subproblem

    def _candidate_of(self, found: Found) -> Candidate:
        own = found.mesh, found.options.microbatches
        return next(p for p in self.candidates if (p.subproblem.mesh, p.subproblem.microbatches) == own)

    # -- time against memory ---------------------------------------------------------------------------------

    def _trade(self, found: Found) -> None:
        """The frontier: the fastest within less than what the last one holds, and so on."""
        bound, self.frontier = self.bound, [found]
        while len(self.frontier) < MOST_POINTS and not self._late():
            point = self._fastest(self.frontier[-1].peak - 1)
            if point is None:
                break
            # A point may hold less in the same time.
            while self.frontier and self.frontier[-1].seconds >= point.seconds:
                self.frontier.pop()
            self.frontier.append(point)
        else:
            self.proven = False
        self.best, self.bound = self.frontier[0], bound

    def _leanest(self, limit: float) -> None:
        """The least peak within `limit`, and what is fastest there; `bound` is in bytes."""
        for candidate in sorted(self.candidates, key=lambda p: -p.subproblem.microbatches):
            if self._late():
                break
            below = min((f.peak for f in self.found), default=math.inf)
            self.asked = self.opened(candidate)
            found, candidate.low = self.asked.least_memory(min(below, limit + 1), self.request.deadline)
            for each in found:
                self._add(each)
        least = min((f.peak for f in self._fitting(limit)), default=math.inf)
        low = min((candidate.low for candidate in self.candidates), default=math.inf)
        if math.isfinite(least):
            self._fastest(least)
        self.proven = low >= min(least, limit + 1)
        self.bound = min(low, least)

    # -- layouts by name -------------------------------------------------------------------------------------

    def _try_named(self, until: float) -> None:
        """Prices what experts would write, to have something early: as lean as it can be until something
        fits, then as it is."""
        for lean in (True, False):
            # More microbatches need less memory.
            for candidate in self.candidates[::-1] if lean else self.candidates:
                if lean and self._fitting(self.request.limit):
                    break
                for mesh, layout, options in self._named(candidate.subproblem.mesh, {}):
                    if time.monotonic() > until:
                        return
                    wanted = (
                        candidate.subproblem.decided.leanest
                        if lean
                        else replace(options, microbatches=candidate.subproblem.microbatches)
                    )
                    self._try(mesh, layout, wanted)

    def _beat_named(self, limit: float) -> None:
        """No plan is slower than the layouts by name, or the greedy one, that are listed beside it."""
        seen: list[Found] = []
        while (best := self._fastest_known(limit)) is not None and best not in seen:
            seen.append(best)
            names = axis_names(best.layout, best.mesh, self.request.model.batch_dim) if self.renames else {}
            for found in self._named(best.mesh, names):
                self._try(*found)
            if not self._late():
                self._try(best.mesh, *greedy(self.request, self.subproblem_of(best)))

    def _named(self, mesh: Mesh, names: Mapping[str, str]) -> Iterator[tuple[Mesh, Layout, Options]]:
        """Layouts by name on a mesh whose axes are called otherwise in a plan."""
        for _, its, layout, options in by_name(self.request.model, mesh, names):
            if its == mesh:
                yield mesh, layout, options

    def _try(self, mesh: Mesh, layout: Layout, options: Options) -> None:
        """Prices a layout, if it is one that may be chosen."""
        request = self.request
        if any((f.mesh, f.layout, f.options) == (mesh, layout, options) for f in self.found):
            return
        candidates = (
            p.subproblem
            for p in self.candidates
            if (p.subproblem.mesh, p.subproblem.microbatches) == (mesh, options.microbatches)
        )
        if not any(_allows(subproblem.decided, layout, options) for subproblem in candidates):
            return
        try:
            evaluation = request.evaluator(mesh, layout, options)
        except LayoutError:
            return
        seconds = evaluation.cost.step_seconds
        solution = Solution(Status.FEASIBLE, (), seconds, -math.inf, 0.0, "by name")
        self._add(Found(mesh, layout, options, evaluation, solution))

    # -- nothing fits ----------------------------------------------------------------------------------------

    def _infeasible(self) -> str:
        """Names the least memory that a layout needs, what of it is proven, and what fills it."""
        request = self.request
        lean: list[Found] = []
        for candidate in self.candidates:
            found, low = self.opened(candidate).leanest(request.deadline)
            candidate.low = max(candidate.low, low)
            lean += [found] if found is not None else []
        asked = f"no layout of {request.model.name!r} fits into {size_text(request.limit)} a device"
        leanest = min([*lean, *self.found], key=lambda f: f.peak, default=None)
        if leanest is None:
            return f"{asked}: the pins and prohibitions allow no legal layout; drop one of them"
        held = ", ".join(f"{h.what} ({size_text(h.bytes)})" for h in leanest.evaluation.memory.holdings[:3])
        low = max(request.limit, min(candidate.low for candidate in self.candidates))
        sure = f"; it is proven that none needs less than {size_text(low)}" if low < leanest.peak else ""
        return (
            f"{asked}: the leanest one found, {str(leanest.layout) or 'replicated'} on {leanest.mesh}, needs "
            f"{size_text(leanest.peak)}, {size_text(leanest.peak - request.limit)} over; its largest "
            f"tensors: {held}{sure}; use more devices or more memory, or a smaller batch"
        )


def _in_words(found: Found) -> str:
    """A layout and what is decided beside it, in short."""
    layout = f"{str(found.layout) or 'nothing split'} on {found.mesh}"
    return "; ".join(filter(None, (layout, decided(found.options).in_short())))


def _allows(decisions: Decisions, layout: Layout, options: Options) -> bool:
    """Whether a layout and its options are among what may be chosen."""
    wanted = decisions.write(layout, options)
    legal = all(wanted[name] in found for name, found in decisions.options.items())
    return legal and decisions.read(wanted) == (layout, options)

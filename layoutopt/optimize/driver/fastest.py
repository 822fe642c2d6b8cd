"""The fastest layout of all problems of a search within a number of bytes.

Every problem has a bound on its seconds. The most promising one is solved first; problems whose bound is no
better than the best answer are skipped. For the least time, a problem is narrowed while its tables are made
(`fixing`); time against memory needs whole problems, which answer for every limit. Bounds also hold for
multiples of a problem's microbatches (`Subproblem.inherit`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from layoutopt.optimize.driver.both_cores import BothCores
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.heuristics.best_plans import held
from layoutopt.optimize.heuristics.incumbents import Incumbents
from layoutopt.optimize.problems.bounds import Bound, BoundSource, State
from layoutopt.optimize.problems.request import Request, SearchStatus
from layoutopt.optimize.problems.subproblem import EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.problems.subproblems import Subproblem, SubproblemKey
from layoutopt.optimize.proof.fixing import ClusterWeights, faster, option_costs
from layoutopt.optimize.proof.layer_bounds import LayerBounds
from layoutopt.space.objective import Objective
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options

NAMED_SHARE = 0.25
"""Part of a time limit in which named layouts are predicted before anything is listed or solved."""
LEAN = 2.0
"""Times the seconds of a layout that does not fit, which it mostly takes at most where it holds least."""


@dataclass
class FastestSearch:
    """Problems with their bounds, and the layouts that were found.

    Attributes:
      renames: a plan gives the axes of its mesh other names.
      frontier: points of time against memory so far.
      proven: all problems were looked at to the end.
      listed: the problems are all there.
      unsplit: dimensions that had to stay whole (`Extraction.unsplit`).
      weights: approximate costs of clusters, for `faster`.
      called: its space, in a word, if it is one of several.
    """

    request: Request
    renames: bool = False
    problems: list[Subproblem] = field(default_factory=list)
    frontier: list[EvaluatedLayout] = field(default_factory=list)
    proven: bool = True
    listed: bool = False
    unsplit: dict[str, None] = field(default_factory=dict)
    weights: dict[Evaluator, ClusterWeights] = field(default_factory=lambda: defaultdict(dict))
    called: str = ""

    def __post_init__(self) -> None:
        self.incumbents = Incumbents(self.request, self.renames)
        self.layers, self.both = LayerBounds(self.request.evaluator), BothCores(self.incumbents)
        self._others: tuple[Subproblem | None, float, int, float] = None, 0.0, 0, 0.0

    @property
    def least(self) -> float:
        """Bytes that no layout holds less than."""
        return min((each.bounds.least for each in self.problems), default=math.inf)

    def lower(self, limit: float) -> Bound:
        """No layout that holds at most `limit` bytes takes fewer seconds."""
        if not self.listed:
            meshes = (each.mesh.devices for each in self.incumbents.subproblems.values())
            return Bound(self.request.evaluator.alone() / next(meshes, math.inf), BoundSource.SHARE)
        every = (each.bounds.lower(limit) for each in self.problems)
        return min(every, key=lambda bound: bound.value, default=Bound(math.inf))

    @property
    def bound(self) -> Bound:
        """No layout of the space is better, by the objective."""
        limit, incumbents = self.request.limit, self.incumbents
        if self.request.objective != Objective.MEMORY:
            lower, best = self.lower(limit), incumbents.seconds(limit)
        else:
            lower = Bound(self.least if self.listed else 0.0, BoundSource.TABLES)
            best = min((found.peak for found in incumbents.fitting(limit)), default=math.inf)
        return replace(lower, value=min(lower.value, best))

    def hold(self, of: Subproblem) -> float:
        """Proves that a device holds variables at least; bytes that no layout of the problem holds less."""
        if of.refused:
            of.bounds.prove(math.inf, BoundSource.REFUSED)
            return math.inf
        of.bounds.hold_at_least(held(self.request.model, of.mesh, of.decided))
        return of.bounds.least

    def fastest(self, limit: float) -> EvaluatedLayout | None:
        """The fastest layout that holds at most `limit` bytes; sets `proven`."""
        request, incumbents = self.request, self.incumbents
        if len(self.problems) > 1 or request.clock.limit is not None:
            for each in self.problems:  # nothing waits less than not at all
                each.bound_by_share(request.evaluator)
        fixes = request.objective == Objective.TIME
        if fixes and request.clock.limit is not None and not self.both.running:
            self.bound_stages(limit)
        every = (p for some in self._in_order(limit) for p in self.both.shared([[p] for p in some], limit))
        for number, each in enumerate(every):
            if not number and fixes and not incumbents.fitting(limit) and not each.refused:
                incumbents.price_on(each)
            self.look_at(each, limit)
        self.look_at_stages(limit)
        if self.still_open(limit):
            self.proven = False
            incumbents.beat_named(limit)
        return incumbents.fastest(limit)

    def look_at(self, subproblem: Subproblem, limit: float) -> None:
        """Looks in a problem for something faster than the best so far, or proves that there is nothing."""
        request, is_open = self.request, self.incumbents.is_open
        subproblem.inherit(request.evaluator)
        if is_open(subproblem, limit):
            self.hold(subproblem)
        if is_open(subproblem, limit) and not request.late:
            self.tell(subproblem)
            time = request.objective == Objective.TIME
            try:
                for by in self.incumbents.sides(subproblem, limit):
                    search = self._fixed(subproblem, limit, by) if time else self.opened(subproblem, by)
                    if search is not None:
                        self._ask(subproblem, search, limit)
            finally:
                for each in self.plain:
                    each.inherit(request.evaluator)

    def _in_order(self, limit: float) -> Iterator[Sequence[Subproblem]]:
        """The problems without stages, by their bounds: what is found there closes most of the others before
        they have a graph. Before all, that of the best known, and what is near it in other graphs."""
        if self.request.clock.limit is not None and self.incumbents.fastest(limit) is None:
            yield self.problems[-1:]  # what fits most likely
        if (known := self.incumbents.fastest(limit)) is not None:
            yield [self.incumbents.subproblem_of(known)]
        yield self.plain

    @property
    def plain(self) -> Sequence[Subproblem]:
        """The problems without stages, by their bounds."""
        return sorted((each for each in self.problems if not each.key.stages), key=lambda p: p.rank)

    def look_at_stages(self, limit: float, second: bool = False) -> None:
        """Looks at the problems with stages, by their bounds. Two processes first bound them by their layers,
        problem by problem with the same tables, the `second` one from the last."""
        staged = [each for each in self.problems if each.key.stages]
        if self.both.running:
            alike = defaultdict[SubproblemKey, list[Subproblem]](list)
            for each in staged:
                alike[each.key._replace(schedule="", again=frozenset(), microbatches=0)].append(each)
            for each in self.both.shared([*alike.values()][:: -1 if second else 1], limit):
                self._prove(each, limit)
        elif self.request.clock.limit is None:
            self.bound_stages(limit)
        for each in self.both.shared([[p] for p in sorted(staged, key=lambda p: p.rank)], limit):
            self._prove(each, limit)
            self.look_at(each, limit)

    def _prove(self, subproblem: Subproblem, limit: float) -> None:
        if self.incumbents.is_open(subproblem, limit) and not self.request.late:
            self.both.exchange()
            self.layers.prove(subproblem, self.incumbents.seconds(limit))

    def bound_stages(self, limit: float) -> None:
        """Bounds problems with stages by their layers, from few tables, in a part of the time."""
        part, told = self.request.clock.part(NAMED_SHARE), None
        for each in (each for each in self.problems if each.key.stages):
            if self.incumbents.is_open(each, limit) and not part.over:
                if told is not (told := each.unstaged):  # the others have the same tables
                    self.tell(each)
                self.layers.prove(each, self.incumbents.seconds(limit), shortly=True)

    def still_open(self, limit: float) -> list[Subproblem]:
        """The problems that something better may be in."""
        best = self.incumbents.seconds(limit)
        return [each for each in self.problems if each.bounds.state(best, limit) is State.OPEN]

    @property
    def unopened(self) -> list[str]:
        """A note about the problems that a search left without tables of their own, if any."""
        if self.proven or not self.listed or self.request.objective == Objective.MEMORY:
            return []
        left = [p for p in self.still_open(self.request.limit) if not p.tabled]
        said = f"{len(left):,} of {len(self.problems):,} combinations of mesh, microbatches and stages"
        staged = sum(bool(p.key.stages) for p in left)
        beside = f" ({staged:,} with pipeline stages)" if staged else ""
        return [f"{said}{beside} were bounded but not searched within the time limit"] if left else []

    def opened(self, subproblem: Subproblem, by: Evaluator | None = None) -> SubproblemSearch:
        """The whole problem, with all its options, by some tables (default: of the device's seconds)."""
        search = subproblem.opened(by or self.request.evaluator, self.request.clock)
        self.unsplit.update(dict.fromkeys(search.extraction.unsplit))
        return search

    def _fixed(self, subproblem: Subproblem, limit: float, by: Evaluator) -> SubproblemSearch | None:
        """A problem, by some tables, without what nothing faster than the best has; None if all, or late."""
        request, incumbents, bounds = self.request, self.incumbents, subproblem.bounds
        upper = incumbents.seconds(limit)
        narrow = subproblem.narrowed(upper, request.evaluator)
        if narrow is None:
            bounds.prove(upper, BoundSource.TABLES)
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
        search = faster(*asked, told=lambda part: self.tell(subproblem, part=part))
        if search is not None:
            bounds.costs = option_costs(search, subproblem.decided, incumbents.seconds(limit)) or bounds.costs
            self.unsplit.update(dict.fromkeys(search.extraction.unsplit))
        return search

    def _ask(self, subproblem: Subproblem, search: SubproblemSearch, limit: float) -> None:
        """Looks in one problem for something faster than the best so far."""
        best = self.incumbents.seconds(limit)
        outcome = search.fastest(
            limit, best, self.request.clock, lambda _, bound: self.tell(subproblem, min(bound, best))
        )
        if (found := outcome.found) is not None:
            self.incumbents.add(found)
            if outcome.stopped:
                raise KeyboardInterrupt
            longer = bool(found.evaluation.cost.host_seconds) == (search.evaluator.of is not None)
            subproblem.bounds.best = found if outcome.proven and longer else None
        # Without an answer it is proven that nothing here is faster than the best.
        subproblem.bounds.prove(min(outcome.bound, best), BoundSource.SOLVER, limit)

    def told(
        self, looked: str, number: int = 0, count: int = 0, low: float | None = None, part: float = 0.0
    ) -> None:
        """Tells how far it is; `low`: by default, the bound of the whole."""
        self.both.exchange()
        if (tell := self.request.on_progress) is None:
            return
        known, low = self.incumbents.best(), self.bound.value if low is None else low
        best = math.inf if known is None else self.incumbents.order(known)[0]
        at = (number, count) if count else (len(self.problems),) * 2
        tell(SearchStatus(looked, *at, best, min(low, best), part, self.called))

    def tell(self, subproblem: Subproblem, bound: float = 0.0, part: float = 0.0) -> None:
        """Tells how far the whole search is, with a solver's bound of this problem, and its finished part."""
        self.both.exchange()
        request, count = self.request, len(self.problems)
        if request.on_progress is None:
            return
        if request.objective == Objective.MEMORY:
            others, low = sum(p is not subproblem and not p.bounds.least for p in self.problems), self.least
        else:
            best = self.incumbents.seconds(request.limit)
            if self._others[:2] != (subproblem, best):  # of thousands, while a solver tells of one
                found = [p for p in self.still_open(request.limit) if p is not subproblem]
                least = min((p.bounds.lower(request.limit).value for p in found), default=math.inf)
                self._others = subproblem, best, len(found), least
            *_, others, least = self._others
            low = min(max(bound, subproblem.bounds.lower(request.limit).value), least)
        looked = subproblem.words(self.renames, len(self.frontier))
        self.told(looked, count - others, count, None if self.frontier else low, part)

"""The best of the plans of one name: the search with fewer choices, over meshes and numbers of microbatches.

The same tables, bounds and solvers as for the whole space find it, with the same cached programs. Fewer
microbatches come first: if pieces cost no less than the whole, the fastest plan with few of them that fits is
also the fastest with more. Where everything takes `FAR` times the seconds of the best layout at least, any
plan that fits will do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from layoutopt.formulation.extract import Draft, legal_problem
from layoutopt.optimize.heuristics.baselines import Plans
from layoutopt.optimize.problems import least_memory
from layoutopt.optimize.problems.bounds import EXACT
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.problems.subproblems import Subproblem
from layoutopt.optimize.proof.fixing import ClusterWeights, faster, fill
from layoutopt.space.decisions import Decisions
from layoutopt.space.microbatches import numbers
from layoutopt.space.objective import Objective
from layoutopt.space.recompute import Recompute
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from layoutopt.space.storage import Storage
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import AT, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.options import place_of
from mesh_tf_core.lower.storage import BETWEEN, STATE, VARIABLE, Stage, narrow_reads, splits
from mesh_tf_core.model import Model

PLAIN = Stage(0)
FAR, NEAR = 4.0, 1.2
"""Times the seconds of the best layout from which on any plan will do; from which on more microbatches are
not looked at where fewer fit."""
TRIES = 3
"""Number of answers that exceed the limit slightly before it is lowered by the excess: an alternative needs
no proof. Number of plans of a name that are predicted where no search of theirs ended."""
HEAVY = 12
"""Clusters by which plans are ordered."""


@dataclass
class StrategyAnswer:
    """The best of some plans.

    Attributes:
      found: the fastest that fits; if none does, one that holds little; None: no plan is legal.
      proven: nothing was left out for want of time.
      far: all take `FAR` times the seconds of the best layout; more microbatches were not looked at.
    """

    found: EvaluatedLayout | None = None
    proven: bool = True
    far: bool = False


class BestPlans:
    """Finds the best plans of all names, beside the best layout of all.

    Args:
      seconds: of the best layout.
    """

    def __init__(self, request: Request, seconds: float) -> None:
        self.request, self.seconds = request, seconds
        parts = numbers(request.model, request.allowed.microbatches)
        self.parts = parts[::-1] if request.objective == Objective.MEMORY else parts
        self._weights: dict[int, ClusterWeights] = {}

    def of(self, plans: Sequence[Plans]) -> StrategyAnswer:
        """The fastest that fits, among equal ones of the first plans; for the objective of least memory, one
        with little memory."""
        search = _StrategySearch(self.request, self.seconds, self._weights)
        plans, far = search.ordered(plans, self.parts[0]), False
        for number in self.parts:
            for each in plans:
                search.look(each, number)
            if search.best and search.memory:
                break
            far = not search.best and all(search.least.get(id(each), 0.0) >= search.far for each in plans)
            if far:
                break
            search.enough = NEAR * self.seconds
        if not search.best:
            search.squeeze(plans, self.parts)
        return StrategyAnswer(search.best or search.over, search.proven, far)

    def none_fits(self, plans: Sequence[Plans]) -> bool:
        """True if the variables of each of them are too large: more microbatches do not make them smaller."""
        made = ((each.mesh, each.decided(self.request.allowed, self.parts[0])) for each in plans)
        sizes = (held(self.request.model, mesh, found) for mesh, found in made if found is not None)
        return all(size > self.request.limit for size in sizes)

    def fastest_of(self, known: Iterable[EvaluatedLayout], plans: Sequence[Plans]) -> EvaluatedLayout | None:
        """The fastest of some known layouts that is one of the plans."""

        def among(found: EvaluatedLayout) -> bool:
            parts = found.options.microbatches
            made = (p.decided(self.request.allowed, parts) for p in plans if p.mesh == found.mesh)
            return any(d is not None and d.allows(found.layout, found.options) for d in made)

        return next(filter(among, sorted(known, key=lambda f: f.seconds)), None)

    def lean(self, plans: Sequence[Plans]) -> EvaluatedLayout | None:
        """One of them as written, with the options that hold least and the fewest microbatches, else the
        most that it allows, if it fits; else that with the least memory. No search is needed."""
        found: list[EvaluatedLayout] = []
        for parts in (self.parts[:1], self.parts[:0:-1]):
            for each in plans[:TRIES]:
                every, plain = (each.decided(self.request.allowed, n) for n in parts), each.plain()
                decided = next((d for d in every if d and plain and d.agrees(plain[0])), None)
                if decided is not None and plain is not None:
                    found += filter(None, [_priced(self.request, each.mesh, plain[0], decided)])
                if found and found[-1].peak <= self.request.limit:
                    return found[-1]
        return min(found, key=lambda f: f.peak, default=None)

    def with_options(self, plans: Plans) -> StrategyAnswer:
        """One of some plans that differ in their options alone: the fastest storage, with nothing recomputed
        if that fits, else everything; the fewest microbatches that fit."""
        search = _StrategySearch(self.request, self.seconds, self._weights)
        for number in self.parts:
            decided = plans.decided(self.request.allowed, number)
            if decided is not None and not search.best and not self.request.late:
                search.choose_options(Subproblem.of(plans.mesh, decided))
        return StrategyAnswer(search.best or search.over, not self.request.late)


class _StrategySearch:
    """What is known of some plans.

    Attributes:
      far: seconds; what takes more is looked at only until something fits.
      enough: seconds; what takes more is not looked at once something fits.
      best: of those that fit; `over`: of the others.
      least: of plans by their id, seconds that none takes less than, nor with more microbatches.
      weights: of clusters, for `faster`, by the number of microbatches.
    """

    def __init__(self, request: Request, seconds: float, weights: dict[int, ClusterWeights]) -> None:
        self.request, self.memory, self.weights = request, request.objective == Objective.MEMORY, weights
        self.seconds, self.far, self.enough = seconds, FAR * seconds, FAR * seconds
        self.best: EvaluatedLayout | None = None
        self.over: EvaluatedLayout | None = None
        self.proven = True
        self.least: dict[int, float] = {}

    @property
    def upper(self) -> float:
        """Seconds of the best so far; only what is faster matters."""
        return math.inf if self.memory or self.best is None else self.best.seconds

    def ordered(self, plans: Sequence[Plans], number: int) -> list[Plans]:
        """Plans that differ for the hardware, those first that are likely faster."""
        different: dict[Hashable, Plans] = {}
        for each in plans:
            different.setdefault(self._routes(each), each)
        if len(different) < 3 or self.memory:
            return [*different.values()]
        return sorted(different.values(), key=lambda each: self._estimate(each, number))

    def _routes(self, plans: Plans) -> Hashable:
        """What its data and its other collectives meet, whatever the axes are called."""
        if set(plans.data) & set(plans.rest) or not plans.data:
            return plans.mesh, plans.data
        place = self.request.evaluator.prices(plans.mesh).placement
        return tuple(
            (level.size, level.rate, *((s.size, s.stride, s.ring) for s in level.segments))
            for axes in (plans.data, plans.rest)
            for level in place.route(axes).levels
        )

    def _estimate(self, plans: Plans, number: int) -> float:
        """Seconds of what costs most of one of its plans."""
        decided, plain = plans.decided(self.request.allowed, number), plans.plain()
        if decided is None or plain is None:
            return math.inf
        evaluator = self.request.evaluator
        draft = Draft(evaluator.model, plans.mesh, decided, evaluator.prices(plans.mesh))
        weights = fill(self.weights.setdefault(number, {}), draft)
        chosen = decided.write(plain[0], replace(decided.least_memory, recompute=frozenset()))
        total = 0.0
        for cluster in sorted(draft.left, key=lambda c: -weights[id(c)].seconds)[:HEAVY]:
            entry = draft.tabler_of(cluster).entry(cluster, decided, chosen)
            total += math.inf if entry is None else cluster.multiplicity * entry.seconds
        return total

    def look(self, plans: Plans, number: int) -> None:
        """Looks for something better with a number of microbatches."""
        least = self.least.get(id(plans), 0.0)
        if least >= self.upper * (1 - EXACT) or (self.best and least >= self.enough):
            return
        # Nothing that was searched is faster than the best layout.
        if self.upper <= self.seconds * (1 + EXACT):
            return
        decided = plans.decided(self.request.allowed, number)
        if decided is None:
            return
        if self.request.late:
            self.proven = False
            return
        if held(self.request.model, plans.mesh, decided) > self.request.limit:
            return
        cases = [*_cases(decided, plans)] if plans.split else [decided]
        problems = [Subproblem.of(plans.mesh, case) for case in cases]
        # Each is asked for when the one before it is kept.
        answers: Iterator[EvaluatedLayout | None] = map(self._ask, problems)
        if len(problems) > 1:  # the fastest of all is mostly one of them
            every = Subproblem.of(plans.mesh, decided)
            found = self._ask(every)
            if found is None or _split(found, plans):
                problems, answers = [every], iter([found])
        for found in answers:
            self._keep(found)
        if self.request.evaluator.prices(plans.mesh).pieces_cost_more:
            bounds = (each.bounds.lower().value for each in problems)
            self.least[id(plans)] = min(bounds, default=math.inf)

    def _ask(self, subproblem: Subproblem) -> EvaluatedLayout | None:
        """The best of a problem, or the fastest though it is too large."""
        request, upper = self.request, self.upper
        if self.memory:
            return lean(self.request, subproblem)
        weights = self.weights.setdefault(subproblem.microbatches, {})
        search = faster(request.evaluator, subproblem, upper, lambda *_: upper, request.clock, weights)
        if search is None:
            self.proven = self.proven and not request.late
            return None
        if subproblem.bounds.lower().value >= self.far:
            return search.fastest(math.inf, clock=request.clock).found
        above = None if math.isinf(upper) else upper
        outcome = search.fastest(request.limit, above, request.clock, tries=TRIES)
        self.proven = self.proven and (outcome.proven or bool(outcome.found and not request.late))
        seen = map(search.evaluated, search.evaluations)
        return outcome.found or min(seen, key=lambda f: f.seconds, default=None)

    def choose_options(self, subproblem: Subproblem) -> None:
        """Keeps the fastest storage with no loop recomputed, or with all of them, or what holds least."""
        request, decided = self.request, subproblem.decided
        if not self.memory:
            search = faster(request.evaluator, subproblem, math.inf, lambda *_: math.inf, request.clock)
            for last in (False, True) if search is not None else ():
                assert search is not None
                pins = {
                    n: search.extraction.decided.options[n][-1 if last else 0] for n in decided.of(Recompute)
                }
                pins = {n: choice for n, choice in pins.items() if n in search.extraction.names}
                self._keep(search.fastest(math.inf, clock=request.clock, pinned=pins).found)
                if self.best:
                    return
        self._keep(lean(self.request, subproblem))

    def squeeze(self, plans: Sequence[Plans], parts: Sequence[int]) -> None:
        """Looks for anything that fits, or else holds little."""
        for each in plans:
            known = ((n, each.decided(self.request.allowed, n)) for n in parts)
            legal = [(n, decided) for n, decided in known if decided is not None]
            if not legal or self.best or self.request.late:
                continue
            # Variables do not get smaller with more microbatches.
            fewest = held(self.request.model, each.mesh, legal[0][1]) > self.request.limit
            decided = legal[0 if fewest or self.least.get(id(each), 0.0) >= self.far else -1][1]
            found = lean(self.request, Subproblem.of(each.mesh, decided))
            if found is not None and not _split(found, each):
                cases = (lean(self.request, Subproblem.of(each.mesh, case)) for case in _cases(decided, each))
                found = min(filter(None, cases), key=lambda f: f.peak, default=None)
            self._keep(found)

    def _keep(self, found: EvaluatedLayout | None) -> None:
        if found is None:
            return
        if found.peak > self.request.limit:
            self.over = min(found, self.over or found, key=lambda f: f.peak)
        elif self.memory:
            self.best = min(self.best or found, found, key=lambda f: f.peak)
        else:
            self.best = min(self.best or found, found, key=lambda f: f.seconds)


def _split(found: EvaluatedLayout, plans: Plans) -> bool:
    return not plans.split or any(found.layout.axes(n) for n in plans.split)


def _cases(decided: Decisions, plans: Plans) -> Iterator[Decisions]:
    """The decisions with one of the dimensions split that have to be, each in turn."""
    for name in plans.split:
        some = tuple(filter(None, decided.options.get(name, ())))
        if some:
            yield decided.within({name: some})


def lean(request: Request, subproblem: Subproblem) -> EvaluatedLayout | None:
    """A layout with little memory, without tables of seconds."""
    evaluator, (mesh, decided) = request.evaluator, (subproblem.mesh, subproblem.decided)
    if not (set(decided.free) & set(decided.of(Split)) or decided.couplings):
        return _priced(request, mesh, decided.read({})[0], decided)
    known = legal_problem(evaluator.model, mesh, decided, evaluator.prices(mesh))
    search = SubproblemSearch(evaluator, known)
    return least_memory.lean(search, {}, request.clock)


def _priced(request: Request, mesh: Mesh, layout: Layout, decided: Decisions) -> EvaluatedLayout | None:
    """A layout with the options that hold least; None if it is not legal, or the hosts lack memory."""
    options = decided.least_memory
    with suppress(LayoutError):
        evaluation = request.evaluator(mesh, layout, options)
        if evaluation.beyond_hosts is None:
            return EvaluatedLayout(mesh, layout, options, evaluation)
    return None


def held(model: Model, mesh: Mesh, decided: Decisions) -> float:
    """Bytes of variables that a device holds at least between steps, whatever is chosen."""
    graph, stages = model.step_graph, dict[str, set[int]]()
    masters, there = narrow_reads(graph), decided.least_memory.offload
    for each in (d for d in decided.every if isinstance(d, Storage)):
        for choice, name in itertools.product(each.options, each.variables):
            stages.setdefault(name, set()).add(each.stored(choice).get(name, PLAIN).number)
    most = {n: max(map(mesh.group_size, decided.options[n])) for n in decided.of(Split)}
    most.update(dict.fromkeys((n.partition(AT)[0] for n in decided.of(Elsewhere)), mesh.devices))
    total = 0.0
    for v in graph.variables.values():
        if place_of(v) in there:
            continue
        what = VARIABLE if v.slot_of is None else STATE
        master, own = v.name in masters, stages.get(v.slot_of or v.name, ())
        further = any(splits(stage, what, BETWEEN, master) for stage in own)
        ways = math.prod(most.get(n, 1) for n in v.shape.names)
        total += v.bytes / (mesh.devices if further else min(ways, mesh.devices))
    return total

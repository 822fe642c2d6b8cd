"""Every layout that was priced so far, and the best of them: the answer of a search, whenever it ends.

Layouts that are known before the search (`warm_start`) are predicted first, and named ones (`baselines`)
beside every answer, so no plan is slower than the plan of an expert.

Layouts that a search predicts before it lists its subproblems: an earlier plan's, the pinned one, and
those that experts would write (`baselines`), with stages and microbatches where the space has them.

Each takes milliseconds, and no table. So a search has an answer soon, however many subproblems there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from costmodels.hardware import Hardware
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.heuristics.baselines import axis_names, by_name, called_mesh, greedy, widest
from layoutopt.optimize.heuristics.best_plans import held
from layoutopt.optimize.problems.bounds import State
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.optimize.problems.subproblems import Subproblem, SubproblemKey, listed, possible, related
from layoutopt.plan.build import Plan, decided
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.space.decisions import Decisions, SearchSpace
from layoutopt.space.objective import Objective
from layoutopt.space.restriction import EVERYTHING
from layoutopt.space.splits import Split
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model

EARLIER, PINS, LEAN = "the given plan", "the pins", "with the least memory"
"""The origin of a layout, in words, if it is not a named strategy."""


class FirstLayout(NamedTuple):
    """A layout that is known before a search, as `Incumbents.offer` takes it.

    Attributes:
      origin: where it comes from, in words.
    """

    mesh: Mesh
    layout: Layout
    options: Options
    origin: str


class WarmStart:
    """The layouts that a search predicts first.

    Args:
      shapes: meshes of the search.
      start: an earlier plan; it counts if its mesh has one of these shapes.
      probed: what is known of recipes (`probes`).
    """

    def __init__(
        self,
        request: Request,
        shapes: Sequence[Mesh],
        start: Plan | None = None,
        probed: EvaluatedLayout | None = None,
    ) -> None:
        self.request, self.shapes, self.start, self.probed = request, shapes, start, probed

    @cached_property
    def problems(self) -> list[Subproblem]:
        """The problems of the search, and those that the model refuses."""
        request = self.request
        return [*related(listed(request.model, self.shapes, request.allowed, request.evaluator.near))]

    def possible(self) -> Iterator[Subproblem]:
        """The problems that are not known to be refused; they are listed once these are asked for."""
        yield from possible(self.request.model, self.shapes, self.request.allowed, self.problems)

    def earlier(self) -> Iterator[FirstLayout]:
        """The layout that is known, and that of the earlier plan, on the mesh of the same shape."""
        if (known := self.probed) is not None:
            yield FirstLayout(known.mesh, known.layout, known.options, known.origin)
        if (plan := self.start) is None:
            return
        for mesh in self.shapes:
            if mesh.shape == plan.mesh.shape:
                names = dict(zip(plan.mesh.names, mesh.names, strict=True))
                yield FirstLayout(mesh, plan.layout.renamed(names), plan.options.renamed(names), EARLIER)

    def leanest_first(self) -> list[Subproblem]:
        """The problems in which a device has the fewest examples at a time first."""
        model = self.request.model
        size = model.examples if model.batch_dim is not None else 1

        def pieces(each: Subproblem) -> int:
            others = each.mesh.devices // math.prod(each.stages.values())
            return each.microbatches * math.gcd(others, size // each.microbatches)

        return sorted(self.problems, key=lambda each: -pieces(each))


def named(model: Model, subproblem: Subproblem, lean: bool) -> Iterator[FirstLayout]:
    """Layouts by name in a problem: its stages and pins, and what a name splits over the other axes.

    Args:
      lean: with the options that hold least; else as written.
    """
    mesh, decided = subproblem.mesh, subproblem.decided
    fixed, plain = decided.read({})
    splits = {name: decided.options[name] for name in decided.of(Split)}
    pinned = [n for n, options in splits.items() if options != ((),) and len(options) == 1]
    taken = {axis for name in pinned for axis in fixed.axes(name)}  # by stages, too

    def within(dim: str, axes: Axes) -> Axes:
        """The widest option over these axes."""
        free = {*axes} - taken
        return widest((o for o in splits.get(dim, ((),)) if {*o} <= free), mesh)

    staged = {axis for axes in decided.stages.values() for axis in axes}
    rest = Mesh([(axis, n) for axis, n in mesh.axes if axis not in staged])
    whole, *split = (found for found in by_name(model, rest) if found[1] == rest)
    # Without any split a layout is legal soonest, and holds most.
    for name, _, layout, options in (*split, whole) if lean else (whole, *split):
        wide = Layout({dim: within(dim, axes) for dim, axes in layout.written.items()} | dict(fixed.written))
        storage = {**plain.storage, **options.storage}
        origin = PINS if wide == fixed and {*pinned} - {*decided.stages} else name
        how = decided.least_memory if lean else replace(plain, storage=storage)
        yield FirstLayout(mesh, wide, how, origin + f", {LEAN}" * lean)


class Incumbents:
    """The layouts of one search.

    Args:
      renames: a plan gives the axes of its mesh other names.

    Attributes:
      found: in the order in which they were found.
      most: seconds; nothing slower is looked for.
      subproblems: by their keys; a layout that none of them allows is rejected.
    """

    def __init__(self, request: Request, renames: bool) -> None:
        self.request, self.renames = request, renames
        self.found: list[EvaluatedLayout] = []
        self.most = math.inf
        self.subproblems: dict[SubproblemKey, Subproblem] = {}

    def order(self, found: EvaluatedLayout) -> tuple[float, ...]:
        """The sort key of results: the better one is less."""
        memory = self.request.objective == Objective.MEMORY
        device = found.evaluation.cost.device_seconds  # where all wait for the host, what is left to it
        return (found.peak, found.seconds) if memory else (found.seconds, device, found.peak)

    def add(self, found: EvaluatedLayout) -> None:
        """Keeps a layout, and reports it if it is the best so far that fits."""
        request, known = self.request, self.best()
        better = known is None or self.order(found)[0] < self.order(known)[0]
        self.found.append(found)
        if request.on_better and found.peak <= request.limit and better:
            request.on_better(_in_words(found, self._names(found)), found.seconds, found.peak)

    def _names(self, found: EvaluatedLayout) -> dict[str, str]:
        """What a plan calls the axes of a layout's mesh, where not as they are."""
        return axis_names(found.layout, found.mesh, self.request) if self.renames else {}

    def fitting(self, limit: float) -> list[EvaluatedLayout]:
        """All that hold at most `limit` bytes."""
        return [f for f in self.found if f.peak <= limit]

    def best(self) -> EvaluatedLayout | None:
        """The best by the objective that fits."""
        return min(self.fitting(self.request.limit), key=self.order, default=None)

    def fastest(self, limit: float) -> EvaluatedLayout | None:
        """The fastest within a limit."""
        return min(
            self.fitting(limit),
            key=lambda f: (f.seconds, f.evaluation.cost.device_seconds, f.peak),
            default=None,
        )

    def seconds(self, limit: float) -> float:
        """The seconds of the fastest within a limit, at most `most`; inf if there is none."""
        return min([self.most, *(f.seconds for f in self.fitting(limit))])

    def is_open(self, subproblem: Subproblem, limit: float) -> bool:
        """True if something faster than the fastest within a limit may be in a problem."""
        return subproblem.bounds.state(self.seconds(limit), limit) is State.OPEN

    def sides(self, subproblem: Subproblem, limit: float) -> Iterator[Evaluator]:
        """The evaluators whose tables bound a step while a problem is open: of the host's seconds and of the
        device's, whichever is longer. The host's come first where the fastest so far waits for it, last where
        that only shows then."""
        own, asked = self.request.evaluator, list[Evaluator]()
        for each in filter(None, (own.host, own, own.host)):
            best = self.fastest(limit)
            waits = best is not None and best.evaluation.cost.host_seconds
            if each not in asked and (each is own or waits) and self.is_open(subproblem, limit):
                asked.append(each)
                yield each

    def subproblem_of(self, found: EvaluatedLayout) -> Subproblem:
        """The decisions of the subproblem where a layout was found."""
        return self.subproblems[SubproblemKey.of(self.request.model, found.mesh, found.layout, found.options)]

    def has(self, mesh: Mesh, layout: Layout, options: Options) -> bool:
        """True if a layout is one of the space."""
        here = self.subproblems.get(SubproblemKey.of(self.request.model, mesh, layout, options))
        return here is not None and not here.refused and here.decided.allows(layout, options)

    def may_express(self, mesh: Mesh, layout: Layout, options: Options) -> bool:
        """True unless a restriction excludes a layout."""
        return self.request.allowed.restriction is EVERYTHING or self.has(mesh, layout, options)

    def offer(self, mesh: Mesh, layout: Layout, options: Options, origin: str = "") -> EvaluatedLayout | None:
        """Prices a layout; None if it is not one that may be chosen."""
        options = self.request.meeting(options)
        asked = mesh, layout, options
        known = next((f for f in self.found if (f.mesh, f.layout, f.options) == asked), None)
        if known is not None or not self.has(mesh, layout, options):
            return known
        try:
            evaluation = self.request.evaluator(mesh, layout, options)
        except LayoutError:
            return None
        if evaluation.beyond_hosts is not None:
            return None
        found = EvaluatedLayout(mesh, layout, options, evaluation, origin)
        self.add(found)
        return found

    # -- layouts by name -------------------------------------------------------------------------------------

    def know(self, start: WarmStart) -> None:
        """Predicts the layout of an earlier plan; from now on, layouts of all subproblems may be offered."""
        self.subproblems |= {each.key: each for each in start.problems}
        for each in start.earlier():
            self.offer(*each)

    def price_named(self, start: WarmStart, clock: Clock, told: Callable[[str, int, int], None]) -> None:
        """Predicts what experts would write: with the least memory until something fits, then as written in
        the first problem. If the time of `clock` is over already, an answer is all that is missing.

        Args:
          told: called with what is done, the number of a problem, and their count.
        """
        limit, count, late = self.request.limit, len(start.problems), clock.over
        large = dict[object, bool]()  # the variables of a mesh with its stages are, in any microbatches
        for lean, order in ((True, start.leanest_first()), (False, start.problems[:1])):
            for number, each in enumerate(order, 1):
                if (lean or clock.over) if self.fitting(limit) else clock.over and not late:
                    break
                told("named strategies", number, count)
                if each.refused:
                    continue
                if (key := each.key[:2]) not in large:
                    large[key] = held(self.request.model, each.mesh, each.decided) > limit
                if not large[key]:
                    self.price_on(each, lean, UNLIMITED if late else clock)
                elif not self.found:  # one tells how much is needed
                    self.offer(*next(named(self.request.model, each, lean)))

    def price_on(self, subproblem: Subproblem, lean: bool = False, clock: Clock = UNLIMITED) -> None:
        """Predicts the named layouts of a problem as written, and those with the least memory that do not fit
        as written, or all if `lean`. They are alternatives of the answer in any case, and slower layouts need
        no table.
        """
        large = []
        for each in named(self.request.model, subproblem, lean):
            if (clock.over and self.found) or (lean and self.fitting(self.request.limit)):
                return
            found = self.offer(*each)
            large += [each.layout] if found is None or found.peak > self.request.limit else []
        for each in named(self.request.model, subproblem, lean=True) if not lean else ():
            if each.layout in large and not clock.over:
                self.offer(*each)

    def beat_named(self, limit: float) -> None:
        """Searches the named layouts on the mesh of the fastest one, and the greedy one, which are listed
        beside it: one of them may be faster."""
        seen: list[EvaluatedLayout] = []
        while (best := self.fastest(limit)) is not None and best not in seen:
            seen.append(best)
            for name, mesh, layout, options in by_name(self.request.model, best.mesh, self._names(best)):
                if mesh == best.mesh:
                    self.offer(mesh, layout, options, name)
            if not self.request.late:
                self.offer(best.mesh, *greedy(self.request, self.subproblem_of(best)), "greedy")


def _in_words(found: EvaluatedLayout, names: Mapping[str, str]) -> str:
    """A layout and what is decided beside it, in short, with these names of axes."""
    layout, options = found.layout.renamed(names), found.options.renamed(names)
    more = decided(options, layout, found.evaluation.pipeline).in_short()
    return "; ".join(
        filter(None, (f"{str(layout) or 'nothing split'} on {called_mesh(found.mesh, names)}", more))
    )


def compared_with(plan: Plan, hardware: Hardware) -> SearchSpace:
    """The space of the questions about a plan's layout: that of its search; where this went on from the usual
    layouts to everything, the usual space and whatever the layout has beside it."""
    space, first = plan.allowed, plan.question.first
    if not first or plan.model is None:
        return space
    model, near, usual = plan.model, Evaluator(plan.model, hardware).near, SearchSpace(**first)

    def narrowed(space: SearchSpace, **fewer: Any) -> SearchSpace:
        less = space.restriction.narrowed(space.but(**fewer))
        return less if covers(less, model, plan, near) else space

    for name in ("", *reversed(first)):  # all at once; else one by one, schedules before stages
        space = narrowed(space, **{n: getattr(usual, n) for n in first if name in ("", n)})
        for value in getattr(space, name) if name and isinstance(getattr(usual, name), tuple) else ():
            if value not in getattr(usual, name):
                space = narrowed(space, **{name: tuple(v for v in getattr(space, name) if v != value)})
    return space


def covers(space: SearchSpace, model: Model, plan: Plan, near: Callable[[Mesh], Axes]) -> bool:
    """True if a space has the layout of a plan; `near`: as of `Evaluator`."""
    key = SubproblemKey.of(model, plan.mesh, plan.layout, plan.options)
    found = decisions_of(key, space, model, near)
    return found is not None and found.allows(plan.layout, plan.options)


def decisions_of(
    key: SubproblemKey, space: SearchSpace, model: Model, near: Callable[[Mesh], Axes]
) -> Decisions | None:
    """The decisions of a subproblem of a space; None: it has no such one."""
    try:
        here = next((each for each in listed(model, [key.mesh], space, near) if each.key == key), None)
    except UserError:
        return None
    return None if here is None or here.refused else here.decided

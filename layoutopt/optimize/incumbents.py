"""Every layout that was priced so far, and the best of them: the answer of a search, whenever it ends.

Layouts that are known before the search (`warm_start`) are predicted first, and named ones (`baselines`)
beside every answer, so no plan is slower than the plan of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from layoutopt.optimize.baselines import axis_names, by_name
from layoutopt.optimize.heuristics import greedy
from layoutopt.optimize.request import Request
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.optimize.subproblems import Subproblem, SubproblemKey, SubproblemSpec, specs
from layoutopt.optimize.warm_start import WarmStart, named
from layoutopt.plan.build import Plan, decided
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.microbatches import dividing
from layoutopt.space.objective import Objective
from layoutopt.space.restriction import EVERYTHING
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model


class Incumbents:
    """The layouts of one search.

    Args:
      renames: a plan gives the axes of its mesh other names.

    Attributes:
      found: in the order in which they were found.
      most: seconds; nothing slower is looked for.
      subproblems: by their keys; a layout that none of them allows is rejected.
      specs: of further subproblems, which are made once a layout of them is offered.
    """

    def __init__(self, request: Request, renames: bool) -> None:
        self.request, self.renames = request, renames
        self.found: list[EvaluatedLayout] = []
        self.most = math.inf
        self.subproblems: dict[SubproblemKey, Subproblem] = {}
        self.specs: dict[SubproblemKey, SubproblemSpec] = {}

    def order(self, found: EvaluatedLayout) -> tuple[float, float]:
        """The sort key of results: the better one is less."""
        memory = self.request.objective == Objective.MEMORY
        return (found.peak, found.seconds) if memory else (found.seconds, found.peak)

    def add(self, found: EvaluatedLayout) -> None:
        """Keeps a layout, and reports it if it is the best so far that fits."""
        request, known = self.request, self.best()
        better = known is None or self.order(found)[0] < self.order(known)[0]
        self.found.append(found)
        if request.on_better and found.peak <= request.limit and better:
            request.on_better(_in_words(found, self._names(found)), found.seconds, found.peak)

    def _names(self, found: EvaluatedLayout) -> dict[str, str]:
        """What a plan calls the axes of a layout's mesh, where not as they are."""
        return axis_names(found.layout, found.mesh, self.request.model) if self.renames else {}

    def fitting(self, limit: float) -> list[EvaluatedLayout]:
        """All that hold at most `limit` bytes."""
        return [f for f in self.found if f.peak <= limit]

    def best(self) -> EvaluatedLayout | None:
        """The best by the objective that fits."""
        return min(self.fitting(self.request.limit), key=self.order, default=None)

    def fastest(self, limit: float) -> EvaluatedLayout | None:
        """The fastest within a limit."""
        return min(self.fitting(limit), key=lambda f: (f.seconds, f.peak), default=None)

    def seconds(self, limit: float) -> float:
        """The seconds of the fastest within a limit, at most `most`; inf if there is none."""
        found = self.fastest(limit)
        return self.most if found is None else min(self.most, found.seconds)

    def subproblem_of(self, found: EvaluatedLayout) -> Subproblem:
        """The decisions of the subproblem where a layout was found."""
        return self.subproblems[SubproblemKey.of(self.request.model, found.mesh, found.layout, found.options)]

    def subproblem(self, key: SubproblemKey) -> Subproblem | None:
        """The subproblem with this key; None if there is none."""
        if key not in self.subproblems and (spec := self.specs.pop(key, None)) is not None:
            with suppress(UserError):
                self.subproblems[key] = spec.made(self.request.model)
        return self.subproblems.get(key)

    def may_express(self, mesh: Mesh, layout: Layout, options: Options) -> bool:
        """True unless a restriction excludes a layout."""
        if self.request.allowed.restriction is EVERYTHING:
            return True
        here = self.subproblem(SubproblemKey.of(self.request.model, mesh, layout, options))
        return here is not None and here.decided.allows(layout, options)

    def offer(self, mesh: Mesh, layout: Layout, options: Options, origin: str = "") -> EvaluatedLayout | None:
        """Prices a layout; None if it is not one that may be chosen."""
        options = self.request.meeting(options)
        asked = mesh, layout, options
        if (
            known := next((f for f in self.found if (f.mesh, f.layout, f.options) == asked), None)
        ) is not None:
            return known
        here = self.subproblem(SubproblemKey.of(self.request.model, mesh, layout, options))
        if here is None or not here.decided.allows(layout, options):
            return None
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
        self.specs = {spec.key: spec for spec in start.specs}
        for each in start.earlier():
            self.offer(*each)

    def price_named(self, start: WarmStart, clock: Clock, told: Callable[[str, int, int], None]) -> None:
        """Predicts what experts would write: with the least memory until something fits, then as written
        until the time of `clock` is over. If it is over already, an answer is all that is missing.

        Args:
          told: called with what is done, the number of a problem, and their count.
        """
        limit, count, late = self.request.limit, len(start.specs), clock.over
        for lean, order in ((True, start.leanest_first), (False, start.least_idle_first)):
            for number, spec in enumerate(order(), 1):
                enough = lean or clock.over if self.fitting(limit) else clock.over and not late
                if enough:
                    break
                told("named strategies", number, count)
                if (subproblem := self.subproblem(spec.key)) is not None:
                    self.price_on(subproblem, lean, UNLIMITED if late else clock)

    def price_on(self, subproblem: Subproblem, lean: bool = False, clock: Clock = UNLIMITED) -> None:
        """Predicts the named layouts of a problem as written, and those with the least memory that do not fit
        as written, or all if `lean`. They are alternatives of the answer in any case, and slower layouts need
        no table.
        """
        large = []
        for each in named(self.request.model, subproblem, lean):
            if clock.over:
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
    mesh = Mesh([(names.get(axis, axis), n) for axis, n in found.mesh.axes])
    more = decided(options, layout, found.evaluation.pipeline).in_short()
    return "; ".join(filter(None, (f"{str(layout) or 'nothing split'} on {mesh}", more)))


def covers(space: SearchSpace, model: Model, plan: Plan, near: Callable[[Mesh], Axes]) -> bool:
    """True if a space has the layout of a plan; `near`: as of `Evaluator`."""
    mesh, layout, options = plan.mesh, plan.layout, plan.options
    wanted = SubproblemKey.of(model, mesh, layout, options)
    try:
        found = specs(model, [mesh], space, near, dividing(model, space.microbatches))
        here = next((spec.made(model) for spec in found if spec.key == wanted), None)
    except UserError:
        return False
    return here is not None and here.decided.allows(layout, options)

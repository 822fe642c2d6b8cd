"""Every layout that was priced so far, and the best of them: the answer of a search, whenever it ends.

Named layouts (`baselines`) are predicted before anything is solved if time is short, and beside every answer,
so no plan is slower than the plan of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from layoutopt.optimize.baselines import axis_names, by_name
from layoutopt.optimize.heuristics import greedy
from layoutopt.optimize.request import Request
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.optimize.subproblems import Subproblem, key_of
from layoutopt.plan.build import decided
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.solver import Solution, Status
from layoutopt.space.decisions import Decisions
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options


class Incumbents:
    """The layouts of one search.

    Args:
      renames: a plan gives the axes of its mesh other names.
      subproblems: a layout that none of them allows is rejected; the search adds to them.

    Attributes:
      found: in the order in which they were found.
    """

    def __init__(self, request: Request, renames: bool, subproblems: Sequence[Subproblem]) -> None:
        self.request, self.renames, self.subproblems = request, renames, subproblems
        self.found: list[EvaluatedLayout] = []

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
        """The seconds of the fastest within a limit; inf if there is none."""
        found = self.fastest(limit)
        return math.inf if found is None else found.seconds

    def subproblem_of(self, found: EvaluatedLayout) -> Subproblem:
        """The decisions of the subproblem where a layout was found."""
        own = key_of(self.request.model, found.mesh, found.layout, found.options)
        return next(s for s in self.subproblems if s.key == own)

    def offer(self, mesh: Mesh, layout: Layout, options: Options) -> EvaluatedLayout | None:
        """Prices a layout; None if it is not one that may be chosen."""
        options = self.request.meeting(options)
        asked = mesh, layout, options
        if (
            known := next((f for f in self.found if (f.mesh, f.layout, f.options) == asked), None)
        ) is not None:
            return known
        own = key_of(self.request.model, mesh, layout, options)
        here = (s for s in self.subproblems if s.key == own)
        if not any(_allows(subproblem.decided, layout, options) for subproblem in here):
            return None
        try:
            evaluation = self.request.evaluator(mesh, layout, options)
        except LayoutError:
            return None
        if evaluation.beyond_hosts is not None:
            return None
        seconds = evaluation.cost.step_seconds
        solution = Solution(Status.FEASIBLE, (), seconds, -math.inf, 0.0, "by name")
        found = EvaluatedLayout(mesh, layout, options, evaluation, solution)
        self.add(found)
        return found

    # -- layouts by name -------------------------------------------------------------------------------------

    def price_named(self, clock: Clock = UNLIMITED) -> None:
        """Predicts layouts that experts would write, to have an early answer: with the least memory until
        something fits, then as written, and with less memory if that does not fit; until the time of `clock`
        is over."""
        for lean in (True, False):
            # More microbatches need less memory.
            for subproblem in self.subproblems[::-1] if lean else self.subproblems:
                if lean and self.fitting(self.request.limit):
                    break
                whole, *split = self._named(subproblem.mesh, {})
                # What splits nothing comes first, and needs the most memory.
                for mesh, layout, options in (*split, whole) if lean else (whole, *split):
                    if clock.over:
                        return
                    parts = subproblem.microbatches
                    wanted = subproblem.decided.least_memory if lean else replace(options, microbatches=parts)
                    known = len(self.fitting(self.request.limit))
                    self.offer(mesh, layout, wanted)
                    if not lean and len(self.fitting(self.request.limit)) == known and not clock.over:
                        self.offer(mesh, layout, subproblem.decided.least_memory)

    def price_on(self, subproblem: Subproblem) -> None:
        """Predicts named layouts on the mesh of a problem, with less memory if none fits as written. They are
        alternatives of the answer in any case, and slower layouts need no table."""
        mesh, parts, decided = subproblem.mesh, subproblem.microbatches, subproblem.decided
        for lean in (False, True):
            for _, layout, options in self._named(mesh, {}):
                if not self.fitting(self.request.limit) or not lean:
                    self.offer(
                        mesh, layout, decided.least_memory if lean else replace(options, microbatches=parts)
                    )

    def beat_named(self, limit: float) -> None:
        """Searches the named layouts on the mesh of the fastest one, and the greedy one, which are listed
        beside it: one of them may be faster."""
        seen: list[EvaluatedLayout] = []
        while (best := self.fastest(limit)) is not None and best not in seen:
            seen.append(best)
            for found in self._named(best.mesh, self._names(best)):
                self.offer(*found)
            if not self.request.late:
                self.offer(best.mesh, *greedy(self.request, self.subproblem_of(best)))

    def _named(self, mesh: Mesh, names: Mapping[str, str]) -> Iterator[tuple[Mesh, Layout, Options]]:
        """Layouts by name on a mesh whose axes are called otherwise in a plan."""
        for _, its, layout, options in by_name(self.request.model, mesh, names):
            if its == mesh:
                yield mesh, layout, options


def _in_words(found: EvaluatedLayout, names: Mapping[str, str]) -> str:
    """A layout and what is decided beside it, in short, with these names of axes."""
    layout, options = found.layout.renamed(names), found.options.renamed(names)
    mesh = Mesh([(names.get(axis, axis), n) for axis, n in found.mesh.axes])
    more = decided(options, layout, found.evaluation.pipeline).in_short()
    return "; ".join(filter(None, (f"{str(layout) or 'nothing split'} on {mesh}", more)))


def _allows(decisions: Decisions, layout: Layout, options: Options) -> bool:
    """Whether a layout and its options are among what may be chosen."""
    wanted = decisions.write(layout, options)
    legal = all(wanted[name] in found for name, found in decisions.options.items())
    return legal and decisions.read(wanted) == (layout, options)

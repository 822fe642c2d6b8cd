"""All problems of a search, one for every mesh shape, number of microbatches and choice of pipeline stages,
and the best over them.

Every query has one form: which layout is fastest within a number of bytes (`fastest`)? Time against memory is
this query with less and less memory: an answer holds for every limit from its own peak up to the queried one,
and a bound for every lower limit.

A search can be ended at any time, by its clock or by Ctrl-C: layouts are stored as they are predicted
(`incumbents`), and bounds as they rise, so the best so far and its bound are always known.

The least memory that a layout needs, where none fits: how much, of which layout, and what fills it.

One mesh axis where two do the same: `data:64` instead of `data:2;data2:32`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from layoutopt.optimize.driver.fastest import NAMED_SHARE, FastestSearch
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.heuristics.agreement import hold_rows
from layoutopt.optimize.heuristics.baselines import axis_names, called_mesh, in_names
from layoutopt.optimize.heuristics.best_plans import lean
from layoutopt.optimize.heuristics.incumbents import WarmStart
from layoutopt.optimize.problems.bounds import EXACT
from layoutopt.optimize.problems.least_memory import leanest, least_memory
from layoutopt.optimize.problems.request import ANSWERED, SEARCHED, Request, left_whole, uneven
from layoutopt.optimize.problems.subproblem import EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.problems.subproblems import Subproblem
from layoutopt.plan.units import size_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.allow import USUAL
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import InfeasibleError, LayoutError, LimitError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.storage import Stage

AxisLengths = tuple[int, ...]


def merged(
    mesh: Mesh,
    layout: Layout,
    meshes: Mapping[AxisLengths, Mesh],
    evaluate: Callable[[Mesh, Layout], Evaluation],
) -> tuple[Mesh, Layout]:
    """The same splits on a mesh of fewer axes that is as fast and as lean; the given one if there is none.

    Args:
      meshes: those that may be chosen, by shape.
      evaluate: LayoutError where a layout is not legal.
    """
    now = evaluate(mesh, layout)
    for order, alike in _joined(mesh, layout):
        fewer = meshes.get(tuple(order.values()))
        if fewer is None:
            continue
        names = dict(zip(order, fewer.names, strict=True))
        alike = Layout({n: tuple(names[a] for a in axes) for n, axes in alike.written.items()})
        try:
            found = evaluate(fewer, alike)
        except LayoutError:
            continue
        as_fast = found.cost.step_seconds <= now.cost.step_seconds * (1 + EXACT)
        if as_fast and found.memory.peak <= now.memory.peak:
            return merged(fewer, alike, meshes, evaluate)
    return mesh, layout


def simplest(best: EvaluatedLayout, problems: Iterable[Subproblem], evaluator: Evaluator) -> EvaluatedLayout:
    """As good on a mesh with fewer axes, if one of these problems has it; itself where there is none."""
    if any(isinstance(s, Stage) for s in best.options.storage.values()):
        return best  # what names axes by themselves stays on them
    own = best.options.microbatches, best.options.schedule, best.evaluation.pipeline
    alike = (s.mesh for s in problems if (s.microbatches, s.key.schedule, s.stages) == own)

    def evaluate(mesh: Mesh, layout: Layout) -> Evaluation:
        return evaluator(mesh, layout, best.options)

    meshes = {mesh.shape: mesh for mesh in alike}
    mesh, layout = merged(best.mesh, best.layout, meshes, evaluate)
    if mesh == best.mesh:
        return best
    return replace(best, mesh=mesh, layout=layout, evaluation=evaluate(mesh, layout))


def ordered(layout: Layout, mesh: Mesh) -> bool:
    """True if all splits name their axes in the order of the mesh."""
    return all(axes == tuple(a for a in mesh.names if a in axes) for axes in layout.written.values())


def _joined(mesh: Mesh, layout: Layout) -> Iterator[tuple[dict[str, int], Layout]]:
    """Axes that split the same dimensions, or none, made one, the most of them first: two of three can be
    slower where all three are not. The axes are as they are then ordered, the new one in the place of any of
    the old, and those with the largest first, as shapes are searched where the order does not matter."""
    for count in range(len(mesh.names), 1, -1):
        for some in map(set, itertools.combinations(mesh.names, count)):
            if any(len(some & set(axes)) not in (0, count) for _, axes in layout.written.items()):
                continue
            for one in sorted(some, key=mesh.names.index):
                sizes = {a: n for a, n in mesh.axes if a == one or a not in some}
                sizes[one] = mesh.group_size(some)
                for order in (sizes, dict(sorted(sizes.items(), key=lambda axis: -axis[1]))):
                    split = {n: {one if a in some else a for a in axes} for n, axes in layout.written.items()}
                    yield order, Layout({n: tuple(a for a in order if a in split[n]) for n in split})


ADVICE = "use {}, more memory, or a smaller batch"
EXCLUDED = ": --pin and --forbid together exclude every layout; remove one of their rules"
NONE_FOUND = "no layout was found within the time limit, so one may or may not fit; raise --time-limit"
NAMED = 3
"""The largest tensors that are named."""


def nearest_of(
    request: Request,
    problems: Sequence[Subproblem],
    known: EvaluatedLayout | None,
    opened: Callable[[Subproblem], SubproblemSearch],
) -> tuple[EvaluatedLayout | None, bool]:
    """A layout with little memory, and whether there was time to look for all of them.

    Args:
      known: the one that is known to need least.
    """
    best = known

    def look() -> None:
        nonlocal best
        for each in sorted(problems, key=lambda p: -p.microbatches):  # small pieces mostly hold least
            if best is None and each.bounds.least > request.limit:
                best = lean(request, each)  # without tables, which may take long
            if best is None or each.bounds.least < best.peak:
                best, low = leanest(opened(each), request.clock, best=best)
                each.bounds.hold_at_least(low)

    with request.beside():
        ended = request.clock.within(0.0, look)
    return best, ended


def needed(request: Request, nearest: EvaluatedLayout, least: float, renames: bool) -> str:
    """The bytes that the nearest layout needs, its largest tensors, and what its storage cannot split; axes
    have their names in plans.

    Args:
      least: bytes that no layout needs less than.
    """
    names = axis_names(nearest.layout, nearest.mesh, request) if renames else {}
    mesh = called_mesh(nearest.mesh, names)
    layout, low = str(nearest.layout.renamed(names)) or "replicated", max(request.limit, least)
    sure = f" (no layout needs less than {size_text(low)})" if low < nearest.peak else ""
    held = ", ".join(f"{h.what} ({size_text(h.bytes)})" for h in nearest.evaluation.memory.holdings[:NAMED])
    whole = "".join(f"; {each}" for each in left_whole(request, nearest.evaluation))
    held, whole = in_names(held, names), in_names(whole, names)
    # No bound: what fewer devices had to keep whole, more of them may split, and the other way round.
    few = f"{-(-low * mesh.devices // request.limit):,.0f} devices (if memory divides evenly)"
    few = f"about {few}" if low > request.limit else "more devices"
    return (
        f"\nthe layout with the least memory needs {size_text(nearest.peak)}{sure}: {layout} on {mesh}\n"
        f"its largest tensors: {held}{whole}; {ADVICE.format(few)}"
    )


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
        raise LimitError(NONE_FOUND)

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
        fewer = self.renames and not self.request.allowed.named  # what names axes stays on them
        return simplest(best, self.problems, self.request.evaluator) if fewer else best

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

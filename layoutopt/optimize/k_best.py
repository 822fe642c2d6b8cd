"""The best layouts after the best, over all problems of a search, in order.

Every problem waits with what its next layout takes at least: first its bound, then the seconds of its fastest
layout that was not taken yet; the one that promises most is looked at next (Lawler 1972, "A procedure for
computing the K best solutions to discrete optimization problems"). Layouts that differ by the names of axes
alone are one, as are those that a mesh with fewer axes has too.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator

from layoutopt.optimize.merging import ordered
from layoutopt.optimize.request import Request
from layoutopt.optimize.search import LayoutSearch
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.optimize.subproblems import Subproblem, key_of
from layoutopt.space.objective import Objective
from mesh_tf_core.ir.layout import Layout

SAME = 1e-9
"""Relative difference of seconds up to which layouts of the same peak may be one."""


def k_best(search: LayoutSearch, best: EvaluatedLayout) -> Iterator[EvaluatedLayout]:
    """The second best layout, the third, and so on, as long as there are any and there is time.

    Where the least memory was asked for, they hold no more than the best one and take longer.
    """
    request, taken, number = search.request, [best], itertools.count()
    told = {_key(best)}
    limit = best.peak if request.objective == Objective.MEMORY else request.limit
    waiting: list[tuple[float, int, Subproblem, EvaluatedLayout | None]] = []

    def wait(seconds: float, problem: Subproblem, found: EvaluatedLayout | None = None) -> None:
        heapq.heappush(waiting, (seconds, next(number), problem, found))

    for problem in search.problems:
        wait(problem.bounds.lower(limit).value, problem)
    while waiting and not request.late:
        seconds, _, problem, found = heapq.heappop(waiting)
        if found is not None:
            taken.append(found)
            simple = search.simpler(found)
            if _key(simple) not in told:
                told.add(_key(simple))
                yield simple
        elif problem.whole is None and search.opened(problem).relaxed(request.clock) > seconds:
            wait(problem.bounds.lower(limit).value, problem)
            continue
        program = search.opened(problem)
        here = [f for f in taken if f.mesh == problem.mesh]
        copies = (
            program.extraction.choices(x, f.options)
            for f in here
            for x in _copies(request, f)
            if key_of(request.model, f.mesh, x, f.options) == problem.key
        )
        excluded = tuple(dict.fromkeys(choices for choices in copies if choices is not None))
        other = program.fastest(limit, clock=request.clock, excluded=excluded).found
        if other is not None:
            wait(other.seconds, problem, other)


def _key(found: EvaluatedLayout) -> Hashable:
    return found.mesh, found.layout, found.options.key


def _moved(called: dict[str, str], found: EvaluatedLayout) -> bool:
    """Whether the axis that synchronises rarely is called otherwise."""
    rare = found.options.diloco
    return rare is not None and called[rare.axis] != rare.axis


def _copies(request: Request, found: EvaluatedLayout) -> Iterator[Layout]:
    """The layout, and what it is with axes of one size called otherwise, if that is no other price."""
    mesh = found.mesh
    for names in itertools.permutations(mesh.names):
        called = dict(zip(mesh.names, names, strict=True))
        if any(mesh.size(a) != mesh.size(b) for a, b in called.items()) or _moved(called, found):
            continue
        rules = {n: tuple(called[a] for a in axes) for n, axes in found.layout.written.items()}
        if ordered(found.layout, mesh):
            rules = {n: tuple(a for a in mesh.names if a in axes) for n, axes in rules.items()}
        layout = Layout(rules)
        evaluation = request.evaluator(mesh, layout, found.options)
        near = abs(evaluation.cost.step_seconds - found.seconds) <= SAME * found.seconds
        if near and evaluation.memory.peak == found.peak:
            yield layout

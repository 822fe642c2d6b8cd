"""The best layouts after the best, over all problems of a search, in order.

Every problem is ordered by the least time of its next layout: first its bound, then the seconds of its
fastest remaining layout. The most promising problem is next (Lawler 1972, "A procedure for computing the K
best solutions to discrete optimization problems"). Layouts that differ only in the names of axes count as
one. So do those that a mesh with fewer axes also has, and those whose programs differ only in the order of
their instructions and have the same peak, such as storage in which gradients are scattered at once or a
little later.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator

from layoutopt.optimize.driver.search import LayoutSearch, ordered
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import Box, EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.problems.subproblems import Subproblem, SubproblemKey
from layoutopt.solver import cost
from layoutopt.space.objective import Objective
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.program import Local

SAME = 1e-9
"""Relative difference of seconds up to which layouts of the same peak may be one."""


def k_best(search: LayoutSearch, best: EvaluatedLayout) -> Iterator[EvaluatedLayout]:
    """The second best layout, the third, and so on, as long as there are any and there is time.

    With the objective of least memory, they need no more memory than the best one and take longer.
    """
    request, taken, number = search.request, [best], itertools.count()
    told = {program_of(best.evaluation)}
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
            if (key := program_of(simple.evaluation)) not in told:
                told.add(key)
                yield simple
        elif problem.refused:
            continue
        elif not problem.wholes and search.opened(problem).relaxed(request.clock) > seconds:
            wait(problem.bounds.lower(limit).value, problem)
            continue
        program = search.opened(problem)
        here = [f for f in taken if f.mesh == problem.mesh]
        copies = (
            program.extraction.choices(x, f.options)
            for f in here
            for x in _copies(request, f)
            if SubproblemKey.of(request.model, f.mesh, x, f.options) == problem.key
        )
        excluded = tuple(_box(program, choices) for choices in {*copies} if choices is not None)
        other = program.fastest(limit, clock=request.clock, excluded=excluded).found
        if other is not None:
            wait(other.seconds, problem, other)


def program_of(evaluated: Evaluation) -> Hashable:
    """The instructions of a program in any order, each by its computation or move, and its peak."""
    program = evaluated.program

    def values(ids: tuple[int, ...]) -> Hashable:
        every = (program.values[i] for i in ids)
        return tuple((v.shape, v.dtype, v.splits, v.partial, v.host) for v in every)

    found = Counter(
        (
            type(instr),
            instr.origin.node if isinstance(instr, Local) else -1,
            times,
            values(instr.inputs),
            values(instr.outputs),
        )
        for instr, times in program.walk()
    )
    return program.mesh, evaluated.memory.peak, frozenset(found.items())


def _box(search: SubproblemSearch, choices: tuple[int, ...]) -> Box:
    """Choices with all that lower to the same program: options of which each alone does, and all together
    do."""
    problem = search.extraction.problem
    seconds, program = cost(problem, choices), program_of(search.evaluate(choices))

    def same(other: tuple[int, ...]) -> bool:
        near = cost(problem, other) <= seconds * (1 + SAME)
        return near and not search.refused(other) and program_of(search.evaluate(other)) == program

    box: list[tuple[int, ...]] = [(choice,) for choice in choices]
    for i in range(len(search.extraction.names)):
        others = (o for o in range(problem.sizes[i]) if o != choices[i])
        box[i] += tuple(o for o in others if same((*choices[:i], o, *choices[i + 1 :])))
    return tuple(box) if same(tuple(every[-1] for every in box)) else tuple((c,) for c in choices)


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

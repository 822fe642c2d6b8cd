"""The least memory on one mesh: of the layouts of a `SubproblemSearch`, one with a small peak, found quickly,
or the one with the smallest, proven."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from layoutopt.optimize.problems.subproblem import ROUNDING, EvaluatedLayout, SubproblemSearch, go_on
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.solver import ChoiceVariable, Problem, ResourceRow, RowTerm, Status, Term, eliminate, solve
from layoutopt.space.kind import Choice

LEVELS, ROUNDS = 33, 4
"""Steps of memory that are distinguished at once, and number of refinements."""
CLOSE = 1e-3
"""Relative difference below which a bound on memory needs no finer steps."""


def lean(
    search: SubproblemSearch, pinned: Mapping[str, Choice], clock: Clock = UNLIMITED
) -> EvaluatedLayout | None:
    """A layout with little memory, found without a solver: the largest row is made as small as can be,
    then the one that is largest now. None if elimination cannot do that.

    Args:
      pinned: decisions that are taken already.
    """
    problem, best, done = search.pinned(search.extraction.problem, pinned), None, False
    legal = tuple(term.legal for term in problem.terms)
    row = _largest(search.rows, lambda entry: entry.most)
    while row is not None:
        entries = tuple(Term(e.scope, e.table, "bytes") for e in row.entries)
        choices = eliminate(replace(problem, terms=(*legal, *entries))).best()
        if choices is None or search.refused(choices):
            return best
        evaluation = search.evaluate(choices)
        if best is None or evaluation.memory.peak < best.peak:
            best = search.evaluated(choices)
        largest = _largest(search.rows, partial(RowTerm.use, choices=choices))
        row = None if done or clock.over or largest is row else largest
        done = True
    return best


def leanest(
    search: SubproblemSearch,
    clock: Clock = UNLIMITED,
    pinned: Mapping[str, Choice] | None = None,
    best: EvaluatedLayout | None = None,
) -> tuple[EvaluatedLayout | None, float]:
    """A layout with little memory, and a lower bound of every layout's bytes.

    One more variable is the limit of the rows, in steps from their least use to a sufficient one. The lowest
    step under which a legal choice exists is solved for, the answer is evaluated, and the steps get finer
    between the two.

    Args:
      pinned: decisions that are taken already.
      best: a layout that is known, of this problem or another; the answer if nothing here holds less.
    """
    low = max((sum(map(_least, row.entries)) for row in search.rows), default=0.0)
    high = max((sum(entry.most for entry in row.entries) for row in search.rows), default=0.0)
    if best is not None:
        high = float(best.peak)
    for round in range(ROUNDS):
        if round and clock.over:
            break
        levels = np.geomspace(max(low, 1.0), max(low, high, 1.0), LEVELS)
        problem = search.pinned(_levelled(search, levels), pinned or {})
        solution = solve(problem, time_limit=clock.rest)
        if solution.choices is None:
            go_on(solution)
            if best is not None and solution.status is Status.INFEASIBLE:
                low = float(best.peak)  # all that is legal here holds more
            break
        *choices, level = solution.choices
        if solution.status is Status.OPTIMAL and level:
            low = float(levels[level - 1])
        evaluation = search.evaluate(tuple(choices))
        if best is None or evaluation.memory.peak < best.peak:
            best = search.evaluated(tuple(choices))
        go_on(solution)
        high = float(best.peak)
        if high <= low * (1 + CLOSE):
            break
        search.learn(tuple(choices))
    return best, 0.0 if search.extraction.unsplit else low


def _levelled(search: SubproblemSearch, levels: np.ndarray) -> Problem:
    """What is legal, with the number of a level that the rows stay below as the cost."""
    problem = search.extraction.problem
    count = len(problem.variables)
    room = RowTerm((count,), -levels - ROUNDING)
    rows = tuple(replace(row, limit=0.0, entries=(*row.entries, room)) for row in search.rows)
    terms = (
        *(term.legal for term in problem.terms),
        Term((count,), np.arange(len(levels), dtype=float), "level"),
    )
    variables = (*problem.variables, ChoiceVariable("memory", len(levels)))
    return Problem(problem.name, variables, terms, (*problem.rows, *rows))


def least_memory(
    search: SubproblemSearch, below: float = math.inf, clock: Clock = UNLIMITED
) -> tuple[list[EvaluatedLayout], float]:
    """Layouts with less than `below` bytes, the last one least, and a lower bound of every layout's bytes."""
    found: list[EvaluatedLayout] = []
    if math.isfinite(below):
        outcome = search.fastest(below - 1, clock=clock)
        if outcome.found is None and outcome.proven:
            return [], below
        found += [outcome.found] if outcome.found is not None else []
    start, low = leanest(search, clock, best=found[-1] if found else None)
    if start is not None and start not in found:
        found.append(start)
    floor = low
    while found and not clock.over:
        # The fastest within one byte less may hold hardly less: far from the bound, half way is asked.
        peak = found[-1].peak
        near = peak - floor <= CLOSE * peak
        limit = peak - 1.0 if near else (floor + peak) / 2
        outcome = search.fastest(limit, clock=clock)
        if outcome.found is not None:
            found.append(outcome.found)
            continue
        low, floor = max(low, limit if outcome.proven else 0.0), limit
        if near:
            return found, float(peak) if outcome.proven else low
    return found, low


def _largest(rows: Sequence[ResourceRow], of: Callable[[RowTerm], float]) -> ResourceRow | None:
    """The row whose entries come to most, where rows have many entries in common."""
    known = {entry: of(entry) for entry in {e for row in rows for e in row.entries}}
    return max(rows, key=lambda row: math.fsum(known[e] for e in row.entries), default=None)


def _least(entry: RowTerm) -> float:
    values = entry.values
    # What a sparse table does not list is forbidden elsewhere.
    return float(values.min()) if values.size else 0.0

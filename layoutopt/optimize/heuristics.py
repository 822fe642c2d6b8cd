"""Simpler searches on the same mesh: their results show the value of the proof.

  greedy        from nothing split: the one split more that saves most, as long as one saves anything
  least memory  the splits with the smallest peak, whatever they cost in time; what Mesh-TensorFlow's own
                optimiser (`mesh_tensorflow/auto_mtf`) looks for
Both decide about splits alone; storage, recomputation and microbatches are chosen after them (`best_plans`).
Neither needs tables: greedy predicts single layouts, and memory follows from the legal assignments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from layoutopt.formulation.extract import legal_problem
from layoutopt.optimize.least_memory import lean, leanest
from layoutopt.optimize.request import Request
from layoutopt.optimize.subproblem import SubproblemSearch
from layoutopt.optimize.subproblems import Subproblem
from layoutopt.space.decisions import Decisions
from layoutopt.space.kind import Choice
from layoutopt.space.splits import Split
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options

Baseline = tuple[Layout, Options]


def greedy(request: Request, subproblem: Subproblem) -> Baseline:
    """The layout at which no single split more, or wider, saves time by the tables."""
    decided = subproblem.decided
    table_prices = request.evaluator.table_prices(subproblem.mesh, decided)
    plain = Options(microbatches=decided.microbatches)
    layout = Layout({n: decided.options[n][0] for n in decided.of(Split)})
    seconds = table_prices.seconds(layout, plain)
    while True:
        wider = ((table_prices.seconds(more, plain), str(more), more) for more in _one_more(decided, layout))
        best = min(wider, default=(math.inf, "", layout))
        if not best[0] < seconds:
            return layout, plain
        seconds, layout = best[0], best[2]


def _one_more(decided: Decisions, layout: Layout) -> Iterator[Layout]:
    """Every layout with one dimension split over more axes."""
    rules = dict(layout.items())
    for name in decided.of(Split):
        for choice in decided.options[name]:
            if set(choice) > set(layout.axes(name)):
                yield Layout({**rules, name: choice})


def least_memory(request: Request, subproblem: Subproblem) -> Baseline | None:
    """The splits with a small peak; None if there are none in time."""
    decided = subproblem.decided
    others = [n for n in decided.free if n not in decided.of(Split)]
    known = legal_problem(request.model, subproblem.mesh, decided, request.evaluator.prices(subproblem.mesh))
    if any(() not in known.decided.options[n] for n in others):
        return None
    plain: dict[str, Choice] = {n: () for n in others if n in known.names}
    search = SubproblemSearch(request.evaluator, known)
    found = lean(search, plain, request.clock) or leanest(search, request.clock, plain)[0]
    return None if found is None else (found.layout, found.options)


HEURISTICS: dict[str, Callable[[Request, Subproblem], Baseline | None]] = {
    "greedy": greedy,
    "least-memory splits": least_memory,
}
"""The heuristics beside an answer, by their names in plans."""

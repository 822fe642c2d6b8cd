"""The search on one mesh: solves the integer program, evaluates the answer, excludes answers that do not fit,
and repeats.

The answer of a solver is not trusted: `evaluate` lowers the whole graph under it and computes time and memory
again. The memory rows of the integer program never forbid a layout that fits (`memory_constraints`). An
answer that passes the rows and is too large for the evaluator adds rows: those of the loops that it
recomputes, then one that forbids all layouts that are too large for the same reason (`lazy_cuts`). Rows hold
for every limit, so later queries reuse them. The result is proven best among the layouts that fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from layoutopt import solver
from layoutopt.formulation.cuts import PendingSum
from layoutopt.formulation.extract import Extraction, extract
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.solver import cost as objective
from layoutopt.solver import evaluate as evaluate_choices
from layoutopt.solver.elimination import marginals
from layoutopt.space.decisions import Decisions
from layoutopt.space.kind import Choice
from layoutopt.space.recompute import Recompute, RunsAgain, again_in
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.pipeline import alone

Listener = Callable[[float, float], None]
Box = tuple[tuple[int, ...], ...]
"""Some of the solver's choices for every variable, in all combinations."""
ATTEMPTS = (3, 100)
"""Least and largest number of answers that are evaluated before the limit is lowered; then `ATTEMPTS[0]`
more."""
CELLS = 30_000
"""Number of table cells up to which a problem is solved again as often as needed."""
EQUAL = 1e-12
"""Relative difference of sums that are taken in another order."""
SETS = 64
"""Most sets of recomputed loops that are looked at one by one."""
ROUNDING = 0.5
"""Bytes by which a row may be wrong: it never counts more than the evaluator but for the rounding of a sum of
whole numbers (tests/layoutopt/test_tables.py)."""


@dataclass(frozen=True)
class EvaluatedLayout:
    """A layout with the evaluator's price.

    Attributes:
      origin: where it comes from, in words, if it was known before the search (`warm_start`).
    """

    mesh: Mesh
    layout: Layout
    options: Options
    evaluation: Evaluation
    origin: str = ""

    def same(self, other: EvaluatedLayout) -> bool:
        """True if both are one layout."""
        return (self.mesh, self.layout, self.options) == (other.mesh, other.layout, other.options)

    @cached_property
    def seconds(self) -> float:
        return self.evaluation.cost.step_seconds

    @cached_property
    def peak(self) -> int:
        return self.evaluation.memory.peak


@dataclass(frozen=True)
class SubproblemOutcome:
    """The result of one question about a mesh.

    Attributes:
      found: the best layout (None: there is none, or none was found in time).
      bound: no layout of the space takes fewer seconds.
      proven: by the tables `found` is the best, or its absence is certain; the bound says by how much the
        evaluator may differ.
      stopped: Ctrl-C ended the solver that found it.
    """

    found: EvaluatedLayout | None
    bound: float
    proven: bool
    stopped: bool = False


class _Asked(NamedTuple):
    limit: float
    clock: Clock
    excluded: Sequence[Box]
    tries: int | None


class SubproblemSearch:
    """The integer program of a subproblem, with the memory rows that are known so far."""

    def __init__(self, evaluator: Evaluator, extraction: Extraction) -> None:
        self.evaluator, self.extraction, self.mesh = evaluator, extraction, extraction.mesh
        self.evaluations: dict[tuple[int, ...], Evaluation] = {}
        self.again: list[RunsAgain] = [frozenset()]
        self.cuts: dict[str, solver.ResourceRow] = {}
        self._counted = set[RunsAgain]()  # the sets whose rows were asked for
        self._held: dict[tuple[int, ...], int] = {}  # choices -> number of rows that they were held against

    @classmethod
    def whole(cls, evaluator: Evaluator, mesh: Mesh, decided: Decisions) -> SubproblemSearch:
        """The search over all that may be decided on a mesh."""
        return cls(evaluator, extract(evaluator.model, mesh, decided, evaluator.prices(mesh)))

    def evaluate(self, choices: tuple[int, ...]) -> Evaluation:
        if choices not in self.evaluations:
            self.evaluations[choices] = self.evaluator(self.mesh, *self.extraction.read(choices))
        return self.evaluations[choices]

    def evaluated(self, choices: tuple[int, ...]) -> EvaluatedLayout:
        """The layout of some choices, with its price."""
        return EvaluatedLayout(self.mesh, *self.extraction.read(choices), self.evaluate(choices))

    @cached_property
    def eliminated(self) -> solver.Elimination:
        """The elimination of the problem without its memory rows."""
        return solver.eliminate(self.extraction.problem)

    def relaxed(self, clock: Clock = UNLIMITED) -> float:
        """A bound on the seconds of every layout, whatever memory it takes."""
        if self.extraction.unsplit:
            return 0.0
        if self.eliminated.exact:
            return self.eliminated.bound
        solution = solver.solve(self.extraction.problem, time_limit=clock.rest)
        go_on(solution)
        return solution.bound

    @property
    def rows(self) -> tuple[solver.ResourceRow, ...]:
        """The rows of the devices' memory so far: those of sets of recomputed loops in earlier answers, and
        of none, and cuts from layouts that did not fit."""
        return self.rows_of(self.again)

    def rows_of(self, sets: Sequence[RunsAgain]) -> tuple[solver.ResourceRow, ...]:
        """The rows of some sets of recomputed loops, and cuts."""
        self._counted.update(sets)
        plain = (row for again in sets for row in self.extraction.memory.rows(again))
        return (*plain, *self.cuts.values())

    def limited(self, limit: float, again: RunsAgain | None = None) -> solver.Problem:
        """The problem with its rows under a memory limit; `again`: those of this set of recomputed loops."""
        found = self.rows if again is None else self.rows_of([again])
        rows = (replace(row, limit=limit) for row in found)
        return replace(self.extraction.problem, rows=(*self.extraction.problem.rows, *rows))

    def _roomy(
        self, limit: float, listener: Listener | None, pinned: Mapping[str, Choice]
    ) -> SubproblemOutcome | None:
        """The fastest layout whatever memory it takes, if it fits: then no solver is needed."""
        problem = self.pinned(self.extraction.problem, pinned)
        eliminated = solver.eliminate(problem) if pinned else self.eliminated
        choices = eliminated.best()
        if choices is None:
            return None
        choices = canonical(problem, self.extraction, choices)
        if self.refused(choices):
            return None
        # Rows take longer to make than one layout to evaluate, unless they are needed anyway.
        own = [again_in(self.extraction.read(choices)[1]) - self.extraction.memory.always]
        if self.evaluator.tight and any(row.use(choices) > limit + ROUNDING for row in self.rows_of(own)):
            return None
        evaluation = self.evaluate(choices)
        if evaluation.memory.peak > limit:
            self.evaluator.tight = True
            return None
        bound = eliminated.bound
        if listener is not None:
            listener(evaluation.cost.step_seconds, bound)
        return SubproblemOutcome(self.evaluated(choices), bound, True)

    def refused(self, choices: tuple[int, ...]) -> bool:
        """True if the hosts lack memory for their values, or their link lacks time to move them."""
        return any(row.use(choices) > row.limit for row in self.extraction.problem.rows)

    def fastest(
        self,
        limit: float,
        upper: float | None = None,
        clock: Clock = UNLIMITED,
        listener: Listener | None = None,
        excluded: Sequence[Box] = (),
        pinned: Mapping[str, Choice] | None = None,
        tries: int | None = None,
    ) -> SubproblemOutcome:
        """The fastest layout whose exact peak is at most `limit` bytes and that takes at most `upper`
        seconds.

        A layout that the rows let pass and the evaluator does not adds rows, and the problem is solved again.
        If that happens too often, the limit of the rows is lowered, by a part and finally by all of their
        known deficit. The answer is then not proven best, and the outcome's bound has the possible loss.

        Args:
          excluded: choices that may not be the answer.
          pinned: decisions that are taken already.
          tries: answers that are evaluated before the limit is lowered (default: the more the smaller the
            tables, and one more per set of recomputed loops).
        """
        found = None if excluded else self._roomy(limit, listener, pinned or {})
        if found is None:
            asked = _Asked(limit, clock, excluded, tries)
            found = self._fastest(math.inf if upper is None else upper, listener, pinned or {}, asked)
            self.hold_rows()
        return replace(found, bound=0.0, proven=False) if self.extraction.unsplit else found

    def _sets(self, pinned: Mapping[str, Choice]) -> list[tuple[float, dict[str, Choice], RunsAgain | None]]:
        """What loops may recompute, with seconds that no layout takes less than, the least first; all at once
        if they are many. Of one set alone the rows are few, and no large number switches them off."""
        decided, names = self.extraction.decided, self.extraction.names
        loops = decided.of(Recompute)
        own = [n for n in loops if n in names and n not in pinned]
        every = [list(enumerate(decided.options[n])) for n in own]
        if math.prod(map(len, every)) > SETS or not self.eliminated.exact:
            return [(0.0, {}, None)]
        costs, found = marginals(self.eliminated, self.extraction.problem.sizes), []
        for chosen in itertools.product(*every):
            each = list(zip(own, chosen, strict=True))
            low = max((float(costs[names.index(n)][i]) for n, (i, _) in each), default=0.0)
            taken = {n: choice for n, (_, choice) in each}
            again = frozenset((n, c) for n, c in {**pinned, **taken}.items() if c and n in loops)
            found.append((low, taken, again - self.extraction.memory.always))
        return sorted(found, key=lambda f: f[0])

    def _fastest(
        self, upper: float, listener: Listener | None, pinned: Mapping[str, Choice], asked: _Asked
    ) -> SubproblemOutcome:
        """The fastest layout of all sets of recomputed loops, one after the other."""
        best, bound, proven, stopped = None, math.inf, True, False
        sets = self._sets(pinned)
        for number, (low, chosen, again) in enumerate(sets):
            rest = min(bound, sets[number + 1][0] if number + 1 < len(sets) else math.inf)
            known = upper if best is None else min(upper, best.seconds)
            if math.isinf(low) or low * (1 - EQUAL) > known or (best is not None and low >= best.seconds):
                break
            if stopped or (self.evaluations and asked.clock.over):
                bound, proven = min(bound, low), False
                break
            told, taken = _beside(listener, rest), {**pinned, **chosen}
            outcome = self._under(again, known, told, taken, asked)
            bound, proven = min(bound, outcome.bound), proven and outcome.proven
            stopped = outcome.stopped
            if outcome.found is not None and (best is None or outcome.found.seconds < best.seconds):
                best = outcome.found
        return SubproblemOutcome(best, bound, proven, stopped)

    def _under(
        self,
        again: RunsAgain | None,
        upper: float,
        listener: Listener | None,
        pinned: Mapping[str, Choice],
        asked: _Asked,
    ) -> SubproblemOutcome:
        """The fastest layout with one set of recomputed loops; None: with any."""
        limit, clock, excluded, most = asked
        bound, share, tries, attempt = 0.0, 1.0, most or self._tries(), 0
        above = None if math.isinf(upper) else upper
        sums = self.extraction.decided.of(PendingSum)
        own = [i for i, name in enumerate(self.extraction.names) if name not in sums]
        banned = [{i: box[i] for i in own} for box in excluded]
        while attempt < tries + ATTEMPTS[0]:
            exact = attempt < tries
            if self.evaluations and clock.over:
                break
            part = (attempt - tries + 1) / ATTEMPTS[0]
            rows_limit = limit + ROUNDING if exact else limit * (1 - part * (1 - share))
            problem = self.pinned(self.limited(rows_limit, again), pinned)
            problem = replace(problem, rows=(*problem.rows, *(unlike(b, problem.sizes) for b in banned)))
            solution = solver.solve(problem, time_limit=clock.rest, upper_bound=above, on_progress=listener)
            if exact:
                bound = max(bound, solution.bound)
            if solution.choices is None:
                go_on(solution)
                proven = exact and solution.status is solver.Status.INFEASIBLE
                return SubproblemOutcome(None, math.inf if proven else bound, proven)
            choices = canonical(problem, self.extraction, solution.choices)
            evaluation = self.evaluate(choices)
            if evaluation.memory.peak <= limit:
                proven = exact and solution.status is solver.Status.OPTIMAL
                return SubproblemOutcome(self.evaluated(choices), bound, proven, solution.stopped)
            go_on(solution)
            counted = max(row.use(choices) for row in problem.rows if row.limit == rows_limit)
            share = min(share, counted / evaluation.memory.peak)
            # The rows of one set were there; where there are rows of several, few sets are new.
            new = self.learn(choices) and (again is None or self.learn(choices))
            attempt += not (exact and new and most is None)
        return SubproblemOutcome(None, bound, False)

    def hold_rows(self) -> None:
        """Holds the rows against the program of each of its layouts that was evaluated, by any search."""
        over = self.evaluator.rows_over or 0.0
        for mesh, layout, found in self.evaluator.evaluated():
            allowed = mesh == self.mesh and self.extraction.decided.allows(layout, found.options)
            choices = self.extraction.choices(layout, found.options) if allowed else None
            # Rows of other sets hold nothing.
            here = {frozenset(), again_in(found.options) - self.extraction.memory.always}
            rows = self.rows_of([*(here & self._counted)]) if choices is not None else ()
            if choices is not None and rows and self._held.get(choices) != len(rows):
                self._held[choices] = len(rows)
                more = max(row.use(choices) for row in rows) - found.memory.peak
                over = max(over, more) if more > ROUNDING else over
        self.evaluator.rows_over = over

    def _tries(self) -> int:
        cells = sum(int(term.values.size) for term in self.extraction.problem.terms)
        return min(max(CELLS // max(cells, 1), ATTEMPTS[0]), ATTEMPTS[1])

    def pinned(self, problem: solver.Problem, pinned: Mapping[str, Choice]) -> solver.Problem:
        """A problem in which some decisions are taken already."""
        terms = []
        for name, choice in pinned.items():
            options = self.extraction.decided.options[name]
            table = np.array([0.0 if o == choice else math.inf for o in options])
            terms.append(solver.Term((self.extraction.names.index(name),), table, f"pin {name}"))
        return replace(problem, terms=(*problem.terms, *terms))

    def learn(self, choices: tuple[int, ...]) -> bool:
        """Adds the rows of the loops that are recomputed under some choices, or a row of their additional
        memory; returns whether these loops are new."""
        again = again_in(self.extraction.read(choices)[1]) - self.extraction.memory.always
        if again not in self.again:
            self.again.append(again)
            return True
        row = self._cut(choices)
        self.cuts[row.name] = row
        return False

    def _cut(self, choices: tuple[int, ...]) -> solver.ResourceRow:
        """The row of choices that do not fit: of the step of one replica, where there are several."""
        from layoutopt.optimize.problems.lazy_cuts import lazy_cut

        found = self.evaluate(choices)
        if found.replicas is None:
            return lazy_cut(self.extraction, choices, found)
        layout, options = self.extraction.read(choices)
        own = self.evaluator(self.mesh, layout, alone(options, self.mesh))
        met = found.memory.variables - own.memory.variables
        if found.memory.peak > own.memory.peak + met:  # the most is held while replicas meet
            wanted = {i: (choice,) for i, choice in enumerate(choices[: len(self.extraction.names)])}
            return unlike(wanted, self.extraction.problem.sizes)
        return lazy_cut(self.extraction, choices, own, met)


def _beside(listener: Listener | None, others: float) -> Listener | None:
    """A listener that hears of the bound of one set among others with a bound of their own."""
    return None if listener is None else lambda best, bound: listener(best, min(bound, others))


def go_on(solution: solver.Solution) -> None:
    """Ctrl-C ends a solver, which then returns its best answer; it also ends the whole search."""
    if solution.stopped:
        raise KeyboardInterrupt


def unlike(decided: Mapping[int, Sequence[int]], sizes: Sequence[int]) -> solver.ResourceRow:
    """A row that forbids some choices of all that is decided, by variable, in every combination, whatever
    follows of them: message groups, and where sums wait."""
    tables = {i: np.isin(np.arange(sizes[i]), choices).astype(float) for i, choices in decided.items()}
    entries = tuple(solver.RowTerm((i,), table) for i, table in tables.items())
    return solver.ResourceRow(f"not {tuple(decided.values())}", len(decided) - 1.0, entries)


def canonical(problem: solver.Problem, extraction: Extraction, choices: tuple[int, ...]) -> tuple[int, ...]:
    """Choices that cost no more, with the plain option wherever it makes no difference."""
    best = list(choices)
    most = objective(problem, choices) * (1 + EQUAL)
    for i, name in enumerate(extraction.names):
        plain = extraction.decided.options[name].index(()) if () in extraction.decided.options[name] else 0
        for option in sorted({plain, *range(best[i])}, key=lambda o: (o != plain, o)):
            if option == best[i]:
                break
            other = (*best[:i], option, *best[i + 1 :])
            # Most options already cost more; only of the others are the rows worth adding up.
            if objective(problem, other) <= most and evaluate_choices(problem, other).feasible:
                best[i] = option
                break
    return tuple(best)

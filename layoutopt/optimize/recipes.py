"""Layouts that experts would write in every family of problems, and what is near the best of them; no proofs.

A *family* is a mesh with its stages; its problems differ in schedules, microbatches and recomputed parts. The
named splits (`named`) are predicted once in each. From the fastest of them on, one thing at a time is
changed (recomputed parts, schedule, microbatches), and what is decided beside the splits is searched: such
problems are small. So a search that ends early has looked at every family.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from layoutopt.optimize.bounds import ProvenBounds
from layoutopt.optimize.fixing import faster
from layoutopt.optimize.incumbents import Incumbents, named
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.optimize.subproblems import Subproblem
from layoutopt.runtime.clock import Clock
from layoutopt.space.splits import Split
from layoutopt.space.undivided import stored_at
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import Recomputed, of_stages
from mesh_tf_core.lower.storage import STAGES

JUDGED = 0.5
"""Share of the time in which splits are predicted, before any are changed."""
PLAIN, STAGED = 2, 6
"""Splits from which others are looked for, without stages and with stages."""
NEAR, AGAIN = 1.15, 4 / 3
"""Times the fastest known seconds above which splits are left as they are: schedules and storage gain less.
Largest ratio, nearly, of steps that recompute everything and nothing."""
OVER = 1.5
"""Times the limit of what splits hold with everything recomputed, above which they are given up."""
COORDINATES = "again", "schedule", "microbatches"
"""The parts of a family's keys that are changed, in this order."""


class Guess(NamedTuple):
    """Splits of a family.

    Attributes:
      seconds: predicted in `problem`, whatever memory they take.
    """

    seconds: float
    problem: Subproblem
    layout: Layout
    options: Options


class Recipes:
    """Looks for layouts within a limit of memory, until the time of a clock is over.

    Args:
      hold: bytes that no layout of a problem holds less.
      told: called with every problem that is looked at.
    """

    def __init__(
        self,
        incumbents: Incumbents,
        limit: float,
        clock: Clock,
        hold: Callable[[Subproblem], float],
        told: Callable[[Subproblem], None],
    ) -> None:
        self.incumbents, self.limit, self.clock, self.hold, self.told = incumbents, limit, clock, hold, told
        self.evaluator = incumbents.request.evaluator

    def look(self, problems: Iterable[Subproblem]) -> None:
        """Adds what it finds to the incumbents."""
        families = defaultdict[object, list[Subproblem]](list)
        for each in problems:
            if self.incumbents.is_open(each, self.limit):
                families[each.key[:2]].append(each)
        part, fewest = (
            self.clock.part(JUDGED),
            sorted(families.values(), key=lambda f: sum(f[0].stages.values())),
        )
        guesses = [g for family in fewest if not part.over for g in self._judged(family)]
        guesses.sort(key=lambda g: g.seconds)
        for most, staged in ((STAGED, True), (PLAIN, False)):
            for guess in [g for g in guesses if bool(g.problem.key.stages) is staged][:most]:
                if self.clock.over or guess.seconds >= NEAR * self.incumbents.seconds(self.limit):
                    break
                self._improve(guess, families[guess.problem.key[:2]])

    def _judged(self, family: Sequence[Subproblem]) -> Iterator[Guess]:
        """The named splits that leave no axis to copies, as written, where stages are idle least: with
        the most microbatches of stages, and the most with an example for each device; else with the fewest.
        """
        model, known = self.incumbents.request.model, set[Layout]()
        for problem in self._idle_least(family):
            self.told(problem)
            every = {a for a, n in problem.mesh.axes if n > 1}
            for _, layout, options, _ in named(model, problem, lean=False):
                whole = {a for axes in layout.written.values() for a in axes} >= every
                both = self._sharded(options), options
                allowed = [o for o in both if whole and self.incumbents.has(problem.mesh, layout, o)]
                for how in allowed[:1] if layout not in known else ():
                    seconds = self._seconds(problem, layout, how)
                    if math.isfinite(seconds):
                        known.add(layout)
                        yield Guess(seconds, problem, layout, how)

    def _idle_least(self, family: Sequence[Subproblem]) -> list[Subproblem]:
        first, examples = family[0], self.incumbents.request.model.examples
        ranks = first.mesh.devices // math.prod(first.stages.values())
        if not first.key.stages:
            some = [min(family, key=lambda p: p.microbatches)]
        else:
            each = [p for p in family if examples % (p.microbatches * ranks) == 0]
            some = [max(of, key=lambda p: p.microbatches) for of in (family, each) if of]
        return [p for p in dict.fromkeys(some) if not p.refused]

    def _sharded(self, options: Options) -> Options:
        """With the optimizer's state split, where nothing is said of storage."""
        every = self.incumbents.request.model.graph.variables.values()
        return replace(options, storage={**stored_at(every, STAGES[1]), **options.storage})

    def _seconds(self, problem: Subproblem, layout: Layout, options: Options) -> float:
        try:
            return self.evaluator(problem.mesh, layout, options).cost.step_seconds
        except LayoutError:
            return math.inf

    def _improve(self, guess: Guess, family: Sequence[Subproblem]) -> None:
        """Looks near some splits, as long as something better is found."""
        if not guess.problem.key.stages:  # recomputation is decided with the rest
            fits = (p for p in sorted(family, key=lambda p: p.microbatches) if self.hold(p) <= self.limit)
            next(filter(None, (self._solved(p, guess.layout) for p in fits)), None)
            return
        key = guess.problem.key._replace(again=frozenset(Recomputed(dim) for dim in guess.problem.stages))
        leanest = next((p for p in family if p.key == key), guess.problem)
        best = self._moved(guess, leanest)
        if best is None or best.peak > OVER * self.limit:
            return
        if best.peak > self.limit:
            best = self._solved(leanest, guess.layout)
        while best is not None and not self.clock.over:
            found = self._changed(best, family)
            found = self._solved(self.incumbents.subproblem_of(found), found.layout, found) or found
            best = None if found is best else found

    def _changed(self, best: EvaluatedLayout, family: Sequence[Subproblem]) -> EvaluatedLayout:
        """The fastest that fits of those that differ in one thing, and then in another."""
        for name in COORDINATES:
            here = self.incumbents.subproblem_of(best)
            for each in family:
                if each.key._replace(**{name: getattr(here.key, name)}) == here.key and not self.clock.over:
                    moved = self._moved(best, each, best.seconds)
                    best = moved if moved is not None and moved.peak <= self.limit else best
        return best

    def _moved(
        self, found: Guess | EvaluatedLayout, to: Subproblem, below: float = math.inf
    ) -> EvaluatedLayout | None:
        """A layout in another problem of its family, if it is legal and takes fewer seconds than `below`."""
        key = to.key
        if to.refused:
            return None
        beside = found.options.recompute - of_stages(found.options.recompute, to.stages)
        how = replace(found.options, schedule=key.schedule, microbatches=key.microbatches)
        how = replace(how, recompute=beside | key.again)
        if math.isfinite(below) and self._seconds(to, found.layout, how) >= below:
            return None  # its memory takes longer to predict
        return self.incumbents.offer(to.mesh, found.layout, how)

    def _solved(
        self, problem: Subproblem, layout: Layout, best: EvaluatedLayout | None = None
    ) -> EvaluatedLayout | None:
        """The best of what is decided beside some splits, if it is faster than `best`."""
        own = {n: [layout.axes(n)] for n in problem.decided.of(Split)}
        if any(axes not in problem.decided.options[n] for n, (axes,) in own.items()):
            return None
        self.told(problem)
        upper = AGAIN * self.incumbents.seconds(self.limit) if best is None else best.seconds
        small = replace(problem, given=problem.decided.within(own), bounds=ProvenBounds())
        search = faster(self.evaluator, small, upper, lambda *_: upper, self.clock)
        found = None if search is None else search.fastest(self.limit, upper, self.clock).found
        if found is not None:
            self.incumbents.add(found)
        return found

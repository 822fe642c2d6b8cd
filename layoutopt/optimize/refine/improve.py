"""From a layout to a better one, place by place.

Around a layout, the time of a step under moves in several places is modelled by exact prices of one and of
two:

    T(moves) = T + sum_p D(move of p) + sum_{adjacent p, q} (D(both) - D(one) - D(other))

D(...) is the change by these moves: the whole program with them is lowered and predicted. For two adjacent
places, only moves of one axis to the same dimension are predicted together: they save the message between the
two. The best moves by this model (`layoutopt.solver`) are predicted like all others, and the next round
starts from the best predicted layout: it predicts only moves in changed places and their neighbours again.
Large places come first, then the smaller ones inside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from costmodels.pricing.pricer import Pricer
from layoutopt.optimize.evaluation import Evaluation
from layoutopt.optimize.evaluator import evaluate
from layoutopt.optimize.refine.model_places import AxisMove, ModelPlaces, levels, regions, without
from layoutopt.runtime.clock import LEAST, Clock
from layoutopt.solver import ChoiceVariable, Problem, ResourceRow, RowTerm, Term, solve
from layoutopt.space.decisions import SearchSpace
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Layout, within
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model

WORTH = 1e-4
"""Relative gain below which a layout does not count as better."""
SOLVING = 2.0
"""Seconds that a model of moves is solved for."""
SINGLE = 0.6
"""Share of the time that is left in which single moves of a round are priced; the rest is for pairs."""
LAST = 0.15
"""Share of all time for computing the gain of each place."""
TIGHT = 0.6
"""Share of the memory from which moves are also chosen by their bytes."""


class MoveGain(NamedTuple):
    """Change of a step by moves: seconds and, where memory is tight, the most bytes that a device holds."""

    seconds: float
    bytes: float


@dataclass
class RefineSearch:
    """Layouts of one model, with cached results.

    Attributes:
      allowed: pins and prohibitions hold in every place.
      limit: bytes that a device may hold.
      clock: time limit; its last part is for computing the gain of each place.
      on_better: called with seconds and bytes of every better layout that fits.
      seconds: of every layout that was priced; inf if it is not legal.
      found: the best that was found so far.
    """

    model: Model
    mesh: Mesh
    options: Options
    allowed: SearchSpace
    pricer: Pricer
    limit: float
    clock: Clock
    on_better: Callable[[float, int], None] | None = None
    seconds: dict[Layout, float] = field(default_factory=dict)
    _peaks: dict[Layout, int] = field(default_factory=dict)
    found: Layout | None = None

    @property
    def left(self) -> float:
        """Seconds that are left to look for better."""
        limit = self.clock.limit
        return math.inf if limit is None else (1 - LAST) * limit - self.clock.elapsed

    @property
    def late(self) -> bool:
        """True if no time is left for that."""
        return self.left <= 0

    def _evaluation(self, layout: Layout) -> Evaluation:
        return evaluate(self.model, self.mesh, layout, self.pricer.hardware, self.options, self.pricer, False)

    def price(self, layout: Layout) -> float:
        """Seconds of a step; inf if the layout is not legal."""
        if layout not in self.seconds:
            self.seconds[layout] = math.inf
            try:
                found = self._evaluation(layout)
                self.seconds[layout] = found.cost.step_seconds
            except LayoutError:
                return math.inf
            known = math.inf if self.found is None else self.seconds[self.found]
            if self.seconds[layout] < known:  # it may be the next best
                self._peaks[layout] = found.memory.peak
        return self.seconds[layout]

    def peak(self, layout: Layout) -> int:
        """The most bytes that a device holds under a legal layout."""
        if layout not in self._peaks:
            self._peaks[layout] = self._evaluation(layout).memory.peak
        return self._peaks[layout]

    def fits(self, layout: Layout) -> float:
        """Seconds of a step; inf if the layout is not legal or does not fit."""
        seconds = self.price(layout)
        return seconds if seconds == math.inf or self.peak(layout) <= self.limit else math.inf

    def fastest(self, start: Layout) -> Layout:
        """The best of all that was priced, if it is better than `start`."""
        least = self.fits(start)
        for layout in sorted(self.seconds, key=self.seconds.__getitem__):
            if self.seconds[layout] >= least * (1 - WORTH):
                break
            if self.fits(layout) < math.inf:
                return layout
        return start

    def best(self, start: Layout) -> Layout:
        """The best layout that is found from one that fits, in rounds, until nothing better is found or the
        time is over."""
        layout = start
        graph = self.model.training_step(self.options.microbatches).graph
        for found in levels(graph):
            known: dict[AxisMove, MoveGain] = {}
            while not self.late:
                _Round(self, found, layout, known).run()
                better = self.fastest(layout)
                if better == layout:
                    break
                self._tell(better)
                known = _still_true(known, found, layout, better)
                layout = better
        simple = self.simpler(layout)
        return simple if self.fits(simple) <= self.fits(start) else layout

    def _tell(self, layout: Layout) -> None:
        self.found = layout
        if self.on_better:
            self.on_better(self.seconds[layout], self.peak(layout))

    def simpler(self, layout: Layout) -> Layout:
        """The same without rules of negligible gain, of single places and of adjacent places."""
        graph = self.model.training_step(self.options.microbatches).graph
        for paths in [*((path,) for path, _ in layout.refined), *regions(layout, graph)]:
            fewer = without(layout, *paths)
            if not self.clock.over and self.fits(fewer) <= self.fits(layout) * (1 + WORTH):
                layout = fewer
        return layout

    def worth(self, layout: Layout, paths: Iterable[str]) -> float | None:
        """Seconds that a step takes longer without the rules of some places; None: unknown for lack of
        time."""
        fewer = without(layout, *paths)
        if fewer not in self.seconds and self.clock.over:
            return None
        return self.price(fewer) - self.price(layout)

    def spent_in(self, layout: Layout, found: ModelPlaces) -> Mapping[str, float]:
        """Place -> seconds of a step, including those of its variables' updates."""
        spent = dict.fromkeys(found.by_path, 0.0)
        for line in self._evaluation(layout).cost.lines:
            path = found.of.get(line.origin.node)
            if path is None:
                path = next((p for p in found.by_path if within(line.origin.scope, p)), None)
            if path in spent:
                spent[path] += line.exposed * line.times
        return spent


def _still_true(
    known: Mapping[AxisMove, MoveGain], found: ModelPlaces, before: Layout, after: Layout
) -> dict[AxisMove, MoveGain]:
    """The moves of places that did not change, and meet none that did."""
    changed = {p for p in found.by_path if before.at(p) != after.at(p)}
    near = changed | {p for pair in found.meet if changed & {*pair} for p in pair}
    return {move: change for move, change in known.items() if move.path not in near}


class _Round:
    """Moves from one layout.

    Args:
      known: what single moves change; more are added.

    Attributes:
      both: two moves -> what they change together.
    """

    def __init__(
        self, search: RefineSearch, found: ModelPlaces, start: Layout, known: dict[AxisMove, MoveGain]
    ) -> None:
        self.search, self.places, self.start, self.known = search, found, start, known
        self.now, self.peak = search.price(start), search.peak(start)
        self.tight = self.peak > TIGHT * search.limit
        self.both: dict[tuple[AxisMove, AxisMove], MoveGain] = {}

    def run(self) -> None:
        """Prices moves, one by one and by twos, and what is best by them."""
        spent = self.search.spent_in(self.start, self.places)
        moves = sorted(self.places.moves(self.search.mesh), key=lambda m: (m.to is None, -spent[m.path]))
        pairs_from = (1 - SINGLE) * self.search.left
        for move in moves:
            if self.search.left < pairs_from or self.search.late:
                break
            if move not in self.known:
                changed = self._changed((move,))
                if changed is not None:
                    self.known[move] = changed
        for pair in self._pairs():
            if self.search.late:
                break
            changed = self._changed(pair)
            if changed is not None:
                self.both[pair] = changed
        self._solve()

    def _changed(self, moves: Iterable[AxisMove]) -> MoveGain | None:
        """The change under some moves; None if they do nothing or are not legal."""
        layout = self._moved(moves)
        seconds = math.inf if layout is None else self.search.price(layout)
        if layout is None or seconds == math.inf:
            return None
        bytes = self.search.peak(layout) - self.peak if self.tight else 0.0
        return MoveGain(seconds - self.now, bytes)

    def _moved(self, moves: Iterable[AxisMove]) -> Layout | None:
        layout: Layout | None = self.start
        for move in moves:
            if layout is not None:
                place = self.places.by_path[move.path]
                layout = move.of(place, layout, self.search.mesh, self.search.allowed)
        return layout

    def _pairs(self) -> list[tuple[AxisMove, AxisMove]]:
        """Moves of two places that meet, of one axis to the same dimension; what costs least first."""
        found: list[tuple[float, tuple[AxisMove, AxisMove]]] = []
        for move, changed in self.known.items():
            for other in self.places.near(move.path):
                twin = AxisMove(other, move.axis, move.to)
                if move.path < other and twin in self.known:
                    found.append((changed.seconds + self.known[twin].seconds, (move, twin)))
        return [pair for _, pair in sorted(found, key=lambda each: each[0])]

    def _solve(self) -> None:
        options: dict[str, list[AxisMove]] = {}
        for move in self.known:
            options.setdefault(move.path, []).append(move)
        if not options:
            return
        solution = solve(self._problem(options), time_limit=max(min(SOLVING, self.search.left), LEAST))
        if solution.choices is None:
            return
        chosen = zip(options.values(), solution.choices, strict=True)
        layout = self._moved(moves[c - 1] for moves, c in chosen if c)
        if layout is not None:
            self.search.price(layout)

    def _problem(self, options: Mapping[str, list[AxisMove]]) -> Problem:
        """A variable for each place, whose first choice is to stay."""
        number = {path: i for i, path in enumerate(options)}
        variables = tuple(
            ChoiceVariable.of(path, ["stays", *(f"{m.axis} on {m.to}" for m in moves)])
            for path, moves in options.items()
        )
        terms, entries, shift = list[Term](), list[RowTerm](), 0.0

        def add(scope: tuple[int, ...], seconds: np.ndarray, bytes: np.ndarray, name: str) -> None:
            nonlocal shift
            least = float(seconds.min())
            shift += least
            terms.append(Term(scope, seconds - least, name))
            entries.append(RowTerm(scope, bytes))

        for path, moves in options.items():
            changes = np.array([(0.0, 0.0), *(self.known[m] for m in moves)])
            add((number[path],), changes[:, 0], changes[:, 1], path)
        tables: dict[tuple[str, str], np.ndarray] = {}
        for (one, other), changed in self.both.items():
            paths = one.path, other.path
            shape = (*(len(options[p]) + 1 for p in paths), 2)
            table = tables.setdefault(paths, np.zeros(shape))
            at = options[one.path].index(one) + 1, options[other.path].index(other) + 1
            table[at] = np.array(changed) - self.known[one] - self.known[other]
        for (here, there), table in tables.items():
            scope = number[here], number[there]
            add(scope, table[..., 0], table[..., 1], f"{here} and {there}")
        rows = (
            (ResourceRow("memory", float(self.search.limit - self.peak), tuple(entries)),)
            if self.tight
            else ()
        )
        return Problem("moves", variables, tuple(terms), rows, constant=shift)

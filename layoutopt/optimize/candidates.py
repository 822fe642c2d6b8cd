"""The problems of a search with what is proven of each, and what is proven of many at once.

Where a piece never costs less than its share of the whole (`Pricer.pieces_cost_more`), no layout takes less
with more microbatches: a bound on all layouts, or on those with one option, holds for every multiple of the
number that it was found for. Stages of a pipeline wait less with more: with k M microbatches instead of M, P
stages run k M + P - 1 times, each for at least 1/k as long, so that of a bound this part holds:

    (k M + P - 1) / (k (M + P - 1))

and in a circular schedule likewise with its ticks (`mesh_tf_core.ir.schedules`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from layoutopt.formulation.extract import count_layouts
from layoutopt.optimize.evaluator import Evaluator
from layoutopt.optimize.fixing import SLACK, OptionCosts
from layoutopt.optimize.request import EXACT
from layoutopt.optimize.subproblem import EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.subproblems import Subproblem


@dataclass
class SubproblemCandidate:
    """One problem of the search, and what is proven of it.

    Attributes:
      bound: seconds that no layout takes less of, within the last limit that was asked about or a lower one.
      low: bytes that no layout goes below.
      answer: the fastest within that limit.
    """

    subproblem: Subproblem
    search: SubproblemSearch | None = None
    bound: float = 0.0
    low: float = 0.0
    answer: EvaluatedLayout | None = None

    @property
    def rank(self) -> tuple[float, int, int]:
        """The order of candidates, least first: the most promising, then those that bound more microbatches,
        then small ones, whose answers larger meshes hardly beat."""
        subproblem = self.subproblem
        return self.bound, subproblem.microbatches, count_layouts(subproblem.decided.options)

    def promises(self, seconds: float, limit: float) -> bool:
        """True if something faster may be here that holds at most `limit` bytes."""
        known = self.answer is not None and self.answer.peak <= limit
        return not known and self.low <= limit and self.bound < seconds * (1 - EXACT)


@dataclass
class MicrobatchBounds:
    """The bounds proven, by mesh and stages, for numbers of microbatches; each holds for every multiple of
    them.

    Attributes:
      least: seconds that no layout takes less than.
      costs: seconds that no layout with an option takes less than.
    """

    least: dict[Hashable, dict[int, float]] = field(default_factory=dict)
    costs: dict[Hashable, dict[int, OptionCosts]] = field(default_factory=dict)

    def keep(self, of: Subproblem, seconds: float, costs: OptionCosts | None = None) -> None:
        """No layout of a problem takes less than `seconds`."""
        least = self.least.setdefault(_place(of), {})
        least[of.microbatches] = max(seconds, least.get(of.microbatches, 0.0))
        if costs is not None:
            self.costs.setdefault(_place(of), {})[of.microbatches] = costs

    def bound(self, of: Subproblem) -> float:
        """Seconds that no layout of a problem takes less than."""
        return max((part * seconds for part, seconds in _fewer(self.least, of)), default=0.0)

    def narrowed(self, of: Subproblem, seconds: float) -> Subproblem | None:
        """A problem with what may be in layouts that take at most `seconds`; None if there are none."""
        options, most = dict(of.decided.options), seconds * (1 + SLACK)
        for part, costs in _fewer(self.costs, of):
            for name in costs.keys() & set(of.decided.free):
                options[name] = tuple(o for o in options[name] if part * costs[name].get(o, 0.0) <= most)
        return replace(of, decided=of.decided.within(options)) if all(options.values()) else None


def compute_at_least(candidates: Sequence[SubproblemCandidate], evaluator: Evaluator) -> None:
    """Bounds problems before anything of them is made: nothing waits less than not at all."""
    for each in candidates:
        least = evaluator.least(each.subproblem.mesh, each.subproblem.decided)
        each.bound = max(each.bound, least)


KnownBound = TypeVar("KnownBound")


def _place(of: Subproblem) -> Hashable:
    return of.mesh, frozenset(of.decided.stages.items()), of.decided.schedule, of.decided.again


def _fewer(
    known: Mapping[Hashable, Mapping[int, KnownBound]], of: Subproblem
) -> list[tuple[float, KnownBound]]:
    """What is known of numbers of microbatches that a problem's number is a multiple of, each with the part
    of it that holds here."""
    found = known.get(_place(of), {}).items()
    return [(of.share(number), what) for number, what in found if of.microbatches % number == 0]

"""The bounds of a subproblem: proven seconds of its layouts, for every limit of memory, with their proofs.

A bound that is proven of the layouts that hold at most some bytes holds for every smaller limit too.
Predictions and tables bound layouts with any memory; a solver bounds those within its limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.space.kind import Choice

EXACT = 1e-7
"""Relative gap below which a bound equals its objective: solvers count costs in whole units of about this
size."""
SLACK = 1e-9
"""Relative difference up to which costs are equal."""

OptionCosts = Mapping[str, Mapping[Choice, float]]
"""Decision -> option -> seconds that no layout with it takes less than."""


class BoundSource(StrEnum):
    """The proof of a bound."""

    NOTHING = "open"
    SHARE = "share"
    """A device computes its share of the compute on one device."""
    LAYERS = "layers"
    """The layers of a stage take their part of the layers without stages."""
    FIRST_RUNS = "first runs"
    """Stages run their first runs, whatever they recompute."""
    REFUSED = "refused"
    """The model cannot be split like that."""
    PIECES = "pieces"
    """Fewer microbatches on the same mesh take no longer."""
    TABLES = "bound"
    """Elimination of the tables."""
    SOLVER = "solver"
    LISTED = "listed"
    """All faster layouts were listed, and none fits."""


class State(Enum):
    """Progress with a subproblem, with the best known layout."""

    OPEN = "open"
    """Something better may be in it."""
    PRUNED = "pruned"
    """Nothing better is in it."""
    SOLVED = "solved"
    """Its best layout by the tables is known; the bound may be less than its seconds."""


@dataclass(frozen=True)
class Bound:
    """No layout takes less.

    Attributes:
      value: seconds; bytes where the least memory is the objective.
      within: largest memory, in bytes, of the layouts for which it is proven.
    """

    value: float = 0.0
    source: BoundSource = BoundSource.NOTHING
    within: float = math.inf


@dataclass
class ProvenBounds:
    """The proven facts about the layouts of a subproblem.

    Attributes:
      proven: bounds in seconds, none of which follows from another, the highest first.
      least: bytes that no layout holds less than.
      costs: of options, whatever memory a layout takes.
      best: the fastest layout within the last limit by the tables, if that is proven.
    """

    proven: list[Bound] = field(default_factory=lambda: [Bound()])
    least: float = 0.0
    costs: OptionCosts = field(default_factory=dict)
    best: EvaluatedLayout | None = None

    def prove(self, seconds: float, source: BoundSource, within: float = math.inf) -> None:
        """No layout that holds at most `within` bytes takes fewer seconds."""
        if seconds > self.lower(within).value:
            higher = (b for b in self.proven if b.value > seconds)
            lower = (b for b in self.proven if b.value <= seconds and b.within > within)
            self.proven = [*higher, Bound(seconds, source, within), *lower]

    def learn(self, other: ProvenBounds) -> None:
        """Takes over what is proven of the same problem elsewhere."""
        for each in other.proven:
            self.prove(each.value, each.source, each.within)
        self.hold_at_least(other.least)
        self.costs = self.costs or other.costs

    def hold_at_least(self, size: float) -> None:
        """No layout holds fewer bytes."""
        self.least = max(self.least, size)

    def lower(self, limit: float = math.inf) -> Bound:
        """The highest bound on layouts that hold at most `limit` bytes; inf where none does."""
        if limit < self.least:
            return Bound(math.inf, BoundSource.TABLES, limit)
        return next(b for b in self.proven if b.within >= limit)

    def state(self, seconds: float, limit: float) -> State:
        """OPEN if something that takes fewer seconds and holds at most `limit` bytes may be here."""
        if self.best is not None and self.best.peak <= limit:
            return State.SOLVED
        return State.OPEN if self.lower(limit).value < seconds * (1 - EXACT) else State.PRUNED

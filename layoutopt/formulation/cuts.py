"""Couplings that are too large for a table are cut at their additions.

Lowering lets the sums of all operands of an addition wait behind it, if they are over the same axes. So n
operands are one cluster, and its table grows exponentially with n. If a table would have more cells than
`LOWERED` allows, the addition is cut from its operands, and one more variable records the pending sum: over
some axes, or none. Every operand is priced for itself under each of its choices, and so is the addition. With
the choice of lowering, these tables add up to the cost of the whole. The other choices are those of programs
without a pending sum there, so the least over them never exceeds that cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Space
from layoutopt.space.kind import Choice, Chosen, Decision, Target
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.tracing.graph import Graph

LOWERED = 1 << 14
"""Operations that may be lowered for one table, some seconds, before additions are cut."""
MOST_LOWERED = 1 << 20
"""Operations that are lowered for one table at most, some minutes."""
SMALL = 64
"""Number of cells below which a table is not split."""


@dataclass(frozen=True)
class PendingSum(Decision):
    """Over which axes the operands of one addition are pending sums; lowering decides it."""

    prefix: ClassVar[str] = "sum at "

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        """Nothing: a search chooses none."""
        return {}

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        """None: the space has no options for it."""
        return iter(())

    @classmethod
    def at(cls, node: int, mesh: Mesh) -> Self:
        """The variable of an addition on a mesh."""
        some = (c for n in range(len(mesh.names) + 1) for c in combinations(mesh.names, n))
        return cls(str(node), tuple(some))

    def apply(self, choice: Choice, to: Chosen) -> None:
        """Nothing: it follows from the layout."""

    def read(self, layout: Layout, options: Options) -> Choice:
        """Unknown without lowering."""
        return ()


def most_cells(
    dims: Sequence[str],
    others: Sequence[str],
    shapes: Sequence[Sequence[str]],
    options: Mapping[str, Sequence[Choice]],
) -> int:
    """A bound on the legal assignments of some dimensions and other decisions, from their numbers alone.

    Axis by axis: an axis splits dimensions of which no two occur in one shape.
    """
    free = [n for n in dims if len(options.get(n, ())) > 1]
    rest = math.prod(len(options.get(n, ((),))) for n in others)
    product = math.prod(len(options[n]) for n in free)
    if product <= SMALL:
        return product * rest
    axes = {a for n in free for choice in options[n] for a in choice}
    apart = {n: frozenset(m for shape in shapes if n in shape for m in shape) - {n} for n in free}
    ways = math.prod(max(Counter(map(frozenset, options[n])).values()) for n in free)  # orders of axes
    for axis in axes:
        may = frozenset(n for n in free if any(axis in choice for choice in options[n]))
        ways *= _independent(tuple(sorted((n, apart[n] & may) for n in may)))
    return min(product, ways) * rest


@lru_cache(maxsize=1 << 12)
def _independent(apart: tuple[tuple[str, frozenset[str]], ...]) -> int:
    """How many sets of some dimensions have no two that exclude each other."""
    if not apart:
        return 1
    name, others = max(apart, key=lambda each: len(each[1]))
    if not others:
        return 1 << len(apart)

    def without(gone: frozenset[str]) -> int:
        return _independent(tuple((n, found - gone) for n, found in apart if n not in gone))

    return without(frozenset({name})) + without(others | {name})

"""Clusters as they were lowered, remembered for other axes, other storage, other meshes.

The program of a cluster depends only on which of its dimensions share axes, whatever their names, and on the
answers of the lowering oracle (`mesh_tf_core.lower.oracle`). So axes are numbered in the order in which a
cluster's dimensions name them (`Naming`). If the answers are the same, so is the itemised cost
(`costmodels.pricing.templates`): only its seconds are computed again, on the current mesh.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from costmodels.pricing.pricer import Pricer
from costmodels.pricing.templates import ItemisedCost, Templates
from layoutopt.formulation.lifetimes import LifetimesCache
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.combine import Waiting
from mesh_tf_core.lower.oracle import Answers
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True, slots=True)
class LoweredCluster:
    """A cluster, or the part that recomputation adds to it, after lowering.

    Attributes:
      subgraph: the lowered part.
      asked: queries of lowering, with the answers.
      cost: None if it is not legal.
      waiting: gradient sums that may be combined with those of other clusters.
      totalled: axes and dtype of the values that the update's total takes.
      program: the lowered program; None if the assignment is illegal.
    """

    subgraph: Subgraph
    asked: Answers
    cost: ItemisedCost | None
    waiting: tuple[Waiting, ...]
    totalled: tuple[tuple[Axes, str], ...]
    program: Program | None


@dataclass
class LoweringCache:
    """The lowered clusters of one graph, on hardware that makes the same items."""

    templates: Templates
    lifetimes: LifetimesCache = field(default_factory=LifetimesCache)
    _known: dict[Subgraph, dict[Hashable, list[LoweredCluster]]] = field(default_factory=dict)

    def of(self, subgraph: Subgraph) -> dict[Hashable, list[LoweredCluster]]:
        """The lowered programs of a subgraph, by the axes of its dimensions and its options without
        storage."""
        return self._known.setdefault(subgraph, {})


@dataclass(frozen=True)
class Naming:
    """A mesh with its axes numbered.

    Attributes:
      mesh, pricer: with the numbers as names; the pricer's mesh may have them in another order.
      number: an axis -> its number; `real`: the inverse.
    """

    mesh: Mesh
    pricer: Pricer
    number: Mapping[str, str]
    real: Mapping[str, str]

    @property
    def order(self) -> tuple[str, ...]:
        """The axes in the order of their numbers."""
        return tuple(self.number)


class Namings:
    """All numberings of the axes of one mesh."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._known: dict[tuple[str, ...], Naming] = {}
        self._pricers: dict[Hashable, Pricer] = {}

    def of(self, splits: Iterable[Axes]) -> Naming:
        """Numbers axes in the given order, then the others."""
        mesh = self.pricer.placement.mesh
        order = tuple(dict.fromkeys([*(a for axes in splits for a in axes), *mesh.names]))
        if order not in self._known:
            number = {a: str(i) for i, a in enumerate(order)}
            pricer = self.pricer.renamed(number)
            mesh, real = pricer.placement.mesh, {i: a for a, i in number.items()}
            # Axes that lie on equal links are told apart by no price.
            pricer = self._pricers.setdefault(pricer.placement.routes, pricer)
            self._known[order] = Naming(mesh, pricer, number, real)
        return self._known[order]


def lowering_cache(graph: Graph, pricer: Pricer) -> LoweringCache:
    """The lowering cache of a graph, valid until the graph changes."""
    itemiser = pricer.itemiser
    return graph.remembered((LoweringCache, itemiser), lambda: LoweringCache(Templates(itemiser)))

"""Clusters as they were lowered, remembered for other axes, other storage, other meshes.

The program of a cluster depends only on which of its dimensions share axes, whatever their names, and on the
answers of the lowering oracle (`mesh_tf_core.lower.oracle`). So axes are numbered in the order in which a
cluster's dimensions name them (`Naming`). If the answers are the same, so is the itemised cost
(`costmodels.pricing.templates`): only its seconds are computed again, on the current mesh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

from costmodels.pricing.overlap import loads_or_stores
from costmodels.pricing.pricer import Pricer
from costmodels.pricing.templates import ItemisedCost, Templates
from layoutopt.formulation.lifetimes import LifetimesCache
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower import Options, Subgraph
from mesh_tf_core.lower.collective_matmul import decompose
from mesh_tf_core.lower.messages import Waiting, start_and_done, waiting
from mesh_tf_core.lower.oracle import Answers, Oracle
from mesh_tf_core.lower.pipeline import begin_part
from mesh_tf_core.lower.subgraph import NO_CUT, Cut
from mesh_tf_core.lower.sums import totalled
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


@dataclass(eq=False)
class _Begun:
    """A cluster after `begin_part`; `plain`: after lowering, if no product goes in chunks."""

    asked: Answers
    program: Program | None
    plain: LoweredCluster | None = None


@dataclass
class LoweringCache:
    """The lowered clusters of one graph, on hardware that makes the same items."""

    graph: Graph
    templates: Templates
    lifetimes: LifetimesCache = field(default_factory=LifetimesCache)
    _known: dict[Hashable, list[LoweredCluster]] = field(default_factory=lambda: defaultdict(list))
    _begun: dict[Hashable, list[_Begun]] = field(default_factory=lambda: defaultdict(list))

    def lowered(
        self, subgraph: Subgraph, options: Options, oracle: Oracle, outputs: Set[int], cut: Cut = NO_CUT
    ) -> LoweredCluster:
        """A subgraph of a cluster, lowered now unless it is known.

        Args:
          outputs: `OpCluster.totalled`.
        """
        known = self._known[subgraph, (oracle.layout, options.without_placement, cut.key)]
        for lowered in known:
            if oracle.agree(lowered.asked):
                return lowered
        begun = self._begin(subgraph, options, oracle, cut)
        found = LoweredCluster(subgraph, (), None, (), (), None)
        if begun.program is not None:
            with suppress(LayoutError):
                found = self._ended(begun, subgraph, options, oracle, outputs, cut)
        known.append(replace(found, asked=tuple(oracle.asked.items())))
        return known[-1]

    def _begin(self, subgraph: Subgraph, options: Options, oracle: Oracle, cut: Cut) -> _Begun:
        """A subgraph up to where products go in chunks; the queries are in `oracle.asked`."""
        # Where something runs again, in a stage's backward too, chunks are gathered once more (`placed`).
        walk = subgraph.part(self.graph, options.recompute).root.walk()
        again = any(node.phase == Phase.RECOMPUTE for node, _ in walk)
        chunks = options.collective_matmul if again else None
        known = self._begun[subgraph, (oracle.layout, options.without_chunks, chunks, cut.key)]
        for begun in known:
            if oracle.agree(begun.asked):
                oracle.asked = dict(begun.asked)
                return begun
        oracle.asked, program = {}, None
        with suppress(LayoutError):
            program = begin_part(self.graph, subgraph, oracle, options, cut)
        known.append(_Begun(tuple(oracle.asked.items()), program))
        return known[-1]

    def _ended(
        self, begun: _Begun, subgraph: Subgraph, options: Options, oracle: Oracle, outputs: Set[int], cut: Cut
    ) -> LoweredCluster:
        assert begun.program is not None
        chunked = decompose(begun.program, options.collective_matmul, oracle)
        if chunked is begun.program and begun.plain is not None:
            return begun.plain
        program = start_and_done(cut.end(chunked))
        # What others read of a first run, `Fusion` knows of the whole graph; of a second one it does not.
        every = self.templates.itemised(program if subgraph.again else replace(program, results={}))
        cost = tuple(
            [each for each in every if not loads_or_stores(each[0].template.unit)]
        )  # rows see to these
        found = LoweredCluster(subgraph, (), cost, waiting(program), totalled(program, outputs), program)
        if chunked is begun.program:
            begun.plain = found
        return found


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
        self._known, self._pricers = dict[tuple[str, ...], Naming](), dict[Hashable, Pricer]()

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
    return graph.remembered((LoweringCache, itemiser), lambda: LoweringCache(graph, Templates(itemiser)))

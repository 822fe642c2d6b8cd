"""A group of operations that is predicted alone: `clusters` finds it, `tables` predicts it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from layoutopt.formulation.dependencies import Dependencies
from layoutopt.space.kind import Choice
from layoutopt.space.sequence_parallel import written
from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.subgraph import Access
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True, eq=False)
class Cluster:
    """Operations that are priced together.

    Attributes:
      name: for reports.
      subgraph: the cluster's part of the graph.
      again: nodes that run a second time when loops are recomputed, by the policy of one of its `nests`
        (`remat_policy.Recomputed`).
      first: policy of a nest -> nodes that then run in the first run, if not all of `subgraph`.
      nests: names of nested loops: their policies together determine the second runs.
      crossed: decision about keys -> the dimensions that all its options except the plain one need with equal
        splits.
      alike: decision about recomputation -> options that equal another one for this cluster -> that one.
      dims: names of all dimensions of their inputs and outputs.
      switches: the other decisions that matter to it: storage classes, recomputation.
      shapes: dimension names of every tensor of the cluster, and of everything that one operation iterates
        over; a legal layout uses an axis once in each.
      given, left: choices of `cuts.PendingSum` -> operands, or outputs, whose sum is pending under them.
      totalled: outputs whose sum the update's total takes, with those of other clusters.
      saves: recomputation changes the saved values; otherwise it only adds second runs.
      follows: a choice of `given` -> that of the addition that computes another of its operands: both sums
        are pending over the same axes, or neither is.
      multiplicity: number of equal clusters in the graph; for an outer step, per step.
      members: the nodes of each of them, in corresponding order; the first is the one that is lowered.
    """

    name: str
    subgraph: Subgraph
    again: Mapping[Policies, tuple[Subgraph, ...]]
    dims: tuple[str, ...]
    switches: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    totalled: frozenset[int] = frozenset()
    given: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    left: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)
    multiplicity: float = 1
    saves: bool = False
    members: tuple[tuple[int, ...], ...] = ()
    alike: Mapping[str, Mapping[Choice, Choice]] = field(default_factory=dict)
    crossed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    nests: tuple[frozenset[str], ...] = ()
    first: Mapping[Policies, Subgraph] = field(default_factory=dict)

    @property
    def decisions(self) -> tuple[str, ...]:
        """Names of all decisions that matter to it."""
        return *self.dims, *self.sums, *self.switches

    def second_runs(self, recompute: Policies) -> list[Subgraph]:
        """The parts of the cluster that are recomputed under a set of policies."""
        found = list[Subgraph]()
        for nest in self.nests if recompute else ():
            found += self.again.get(_about(nest, recompute), ())
        return found

    def first_run(self, recompute: Policies) -> Subgraph:
        """The part of the cluster that runs at first under a set of policies."""
        found = self.subgraph
        for nest in self.nests if self.first and recompute else ():
            runs = self.first.get(_about(nest, recompute))
            found = found if runs is None else found.without(found.nodes - runs.nodes)
        return found

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the choices of `given` and `left`."""
        return tuple(dict.fromkeys((*self.given, *self.left)))


def _about(nest: Collection[str], recompute: Policies) -> Policies:
    """The policies about loops of a nest."""
    return frozenset([each.whole for each in recompute if each.dim in nest])


def numbers_of(nodes: Iterable[Node]) -> tuple[int, ...]:
    """The indices of nodes."""
    return tuple(node.index for node in nodes)


def subgraph_of(
    dependencies: Dependencies, nodes: Sequence[Node], accesses: frozenset[Access] = frozenset()
) -> Subgraph:
    """The part of the graph that lowering sees for some nodes, with accesses to variables."""
    graph, blocks = dependencies.graph, set[int]()
    for start in (*(dependencies.block_of[n.index].id for n in nodes), *(b for b, *_ in accesses)):
        block = graph.blocks[start]
        while block.parent is not None:
            blocks.add(block.id)
            block = graph.blocks[block.parent]
    return Subgraph(frozenset(numbers_of(nodes)), frozenset(blocks), accesses, unread=dependencies.unread)


def stages_of(graph: Graph, nodes: Iterable[Node], subgraph: Subgraph) -> list[str]:
    """The dimensions of layers of stages that contain some of a subgraph, or are nodes of it."""
    blocks = [graph.blocks[b] for b in sorted(subgraph.blocks)]
    blocks += [n.body for n in nodes if n.body is not None]
    return [b.dim.name for b in blocks if b.spread and b.dim is not None]


def rules_of(dims: Iterable[str], further: Set[str]) -> tuple[str, ...]:
    """The decisions that split some dimensions further elsewhere."""
    return tuple(written(n) for n in dims if n in further)


def pairs_of(dims: Iterable[str], further: Set[str]) -> tuple[tuple[str, str], ...]:
    """A dimension and its further splits, over other axes."""
    return tuple((n, written(n)) for n in dims if n in further)

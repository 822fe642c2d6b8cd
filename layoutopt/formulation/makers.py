"""The cluster that makes each tensor of a step, and the tensor's name there.

Equal clusters are lowered once: a tensor of any of them is read off the first one, where the tensor at the
same place represents it.

`Accesses` has the clusters of variables: casts and gathers of one variable, in all blocks that read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from layoutopt.formulation.dependencies import Dependencies
from layoutopt.formulation.second_runs import SecondRun, SecondRuns
from layoutopt.space.decisions import changing
from layoutopt.space.kind import Affects, Choice
from layoutopt.space.sequence_parallel import written
from mesh_tf_core.ir.blocks import Assign, Block, Feed, Node, Read
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.nodes import assigned
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.subgraph import Access
from mesh_tf_core.tracing.graph import Graph


class Accesses:
    """The accesses of one step."""

    def __init__(self, dependencies: Dependencies, runs: SecondRuns) -> None:
        self.graph, self.dependencies, self.runs = dependencies.graph, dependencies, runs

    def clusters(self) -> list[OpCluster]:
        """For every variable with its own storage: its casts, and the gather in every block that reads it."""
        merged: dict[Hashable, list[OpCluster]] = defaultdict(list)
        for variable in self.graph.variables.values():
            if variable.own_storage:
                found = self._access(variable)
                if found is not None:
                    key, cluster = found
                    merged[key].append(cluster)
        return [
            replace(found[0], multiplicity=len(found), members=tuple(m for f in found for m in f.members))
            for found in merged.values()
        ]

    def _access(self, variable: Variable) -> tuple[Hashable, OpCluster] | None:
        reads = self.dependencies.reads[variable.name]
        casts = [
            n
            for n in self.dependencies.live
            if n.op.converts and self.dependencies.variable_of(n) == variable.name
        ]
        accesses = self.dependencies.accesses(variable.name)
        if not accesses and not casts:
            return None
        nodes = [*reads, *casts]
        again = self._access_again(casts, accesses)
        loops = self._loops(again)
        granularity, it = self.dependencies.granularity, [variable]
        switches = changing(Affects(loops, it, read=it, granularity=granularity))
        subgraph = subgraph_of(self.dependencies, nodes, frozenset(accesses))
        own = variable.shape.names
        dims = tuple(dict.fromkeys((*own, *stages_of(self.graph, (), subgraph))))
        key = (
            variable.type,
            variable.stacked,
            switches,
            variable.name in assigned(self.graph),
            tuple(sorted((self.dependencies.block_of[n.index].id, n.op.describe()) for n in casts)),
            self._places(accesses),
            tuple(
                (texts, tuple((k.again, len(k.nodes), self._places(k.natural)) for k in found))
                for texts, found in again.items()
            ),
        )
        name, members = f"{variable.name} (access)", (numbers_of(nodes),)
        alike = self.runs.alike(again, {}, loops)
        nests = tuple(nest for nest in self.runs.nests if not nest.isdisjoint(loops))
        shapes = own, *pairs_of(own, self.dependencies.further)
        every = *dims, *rules_of(dims, self.dependencies.further)
        return key, OpCluster(
            name, subgraph, again, every, switches, shapes, members=members, alike=alike, nests=nests
        )

    def _places(self, accesses: Iterable[Access]) -> Hashable:
        """Where a variable is moved, and the share of these moves that counts."""
        counts = self.dependencies.counts
        return tuple(sorted((*at[:2], counts.get(at[3], 1.0)) for at in accesses))

    def _loops(self, again: Mapping[Policies, Sequence[Subgraph]]) -> tuple[str, ...]:
        """Names of the loops that have a say in what is done again."""
        names = dict.fromkeys(name for nest in self.runs.nests for name in sorted(nest))

        def matters(name: str) -> bool:
            others = {said: {each for each in said if each.dim != name} for said in again}
            return any(
                tuple(again.get(frozenset(rest), ())) != again[texts] for texts, rest in others.items()
            )

        return tuple(filter(matters, names))

    def _access_again(self, casts: list[Node], accesses: set[Access]) -> dict[Policies, tuple[Subgraph, ...]]:
        """What recomputation adds: casts and gathers that the backward body does not have anyway.

        What a body inside of the recomputed one does, it does once more in any case.
        """
        extra: dict[SecondRun, tuple[set[int], set[Access]]] = defaultdict(lambda: (set(), set()))
        for backward in self.graph.blocks:
            forward = backward.forward
            for run in () if forward is None else self.runs.of(forward):
                nodes, gathers = self._extra(self.runs.again[run], backward, casts, accesses)
                extra[run][0].update(nodes)
                extra[run][1].update(gathers)
        reads = [n for n in self.dependencies.live if isinstance(n.op, Read)]
        found, different = dict[Policies, tuple[Subgraph, ...]](), dict[Subgraph, Subgraph]()
        for run, (nodes, gathers) in extra.items():
            if nodes or gathers:
                subgraph = subgraph_of(
                    self.dependencies, [*reads, *(n for n in casts if n.index in nodes)], frozenset(gathers)
                )
                second = replace(subgraph, again=run.name)
                found[run.recompute] = (*found.get(run.recompute, ()), different.setdefault(second, second))
        return found

    def _extra(
        self, again: Set[int], backward: Block, casts: list[Node], accesses: set[Access]
    ) -> tuple[set[int], set[Access]]:
        """The casts and gathers that a loop's second run has more than its backward."""
        forward, home = backward.forward, self.dependencies.block_of
        made = {self._value(n.outputs[0], backward) for n in casts if home[n.index] is backward}
        moved = {
            self._value(t, backward) for b, way, t, _ in accesses if (b, way) == (backward.id, Phase.BACKWARD)
        }

        def new(tensor: int, block: Block, known: Set[Hashable]) -> bool:
            ours = any(each is forward for each in self.graph.around(block))
            return ours and not (block is forward and self._value(tensor, block, backward) in known)

        nodes = {n.index for n in casts if n.index in again and new(n.outputs[0], home[n.index], made)}
        gathers = {
            (block, Phase.RECOMPUTE, tensor, reader)
            for block, _, tensor, reader in accesses
            if new(tensor, self.graph.blocks[block], moved)
            and any(
                r.index in again and home[r.index].id == block and r not in casts
                for r in self.dependencies.readers[tensor]
            )
        }
        return nodes, gathers

    def _value(self, tensor: int, block: Block, backward: Block | None = None) -> Hashable:
        """Equal for tensors that lowering makes, and moves, once."""
        conversions = list[Op]()
        maker = self.graph.producer.get(tensor)
        while maker is not None and maker.op.converts and self.graph.tensor(tensor).block == block.id:
            (source,) = maker.inputs
            if self.graph.tensor(source).dtype != self.graph.tensor(tensor).dtype:
                conversions.append(maker.op)
            tensor, maker = source, self.graph.producer.get(source)
        return tensor if backward is None else self.runs.twin(tensor, backward), *conversions


@dataclass(frozen=True, eq=False)
class OpCluster:
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
        blocks.update(block.id for block in graph.around(graph.blocks[start]))
    return Subgraph(frozenset(numbers_of(nodes)), frozenset(blocks), accesses, unread=dependencies.unread)


def stages_of(graph: Graph, nodes: Iterable[Node], subgraph: Subgraph) -> list[str]:
    """The dimensions of layers of stages that contain some of a subgraph, or are nodes of it."""
    blocks = [graph.blocks[b] for b in sorted(subgraph.blocks)]
    blocks += [n.body for n in nodes if n.body is not None]
    return [b.dim.name for b in blocks if b.spread]


def rules_of(dims: Iterable[str], further: Set[str]) -> tuple[str, ...]:
    """The decisions that split some dimensions further elsewhere."""
    return tuple(written(n) for n in dims if n in further)


def pairs_of(dims: Iterable[str], further: Set[str]) -> tuple[tuple[str, str], ...]:
    """A dimension and its further splits, over other axes."""
    return tuple((n, written(n)) for n in dims if n in further)


class TensorMaker(NamedTuple):
    """The maker of a tensor: the number of a cluster, the tensor's id there, and how much of that it is."""

    cluster: int
    tensor: int
    share: float = 1.0


class Makers:
    """The sources of one step.

    Attributes:
      clusters: those with tables, then the feeds and reads that belong to none.
      runs: node -> its cluster, and the node that represents it there.
      given: node -> its cluster's operands -> the tensors that represent them there.
      variable: variable -> the cluster that stores it, and the variable that represents it there.
      gathered: (node of a loop, or 0, tensor of a variable that is read there) -> its source.
      parts: part of a stack -> the stack, and its number of parts; for a stage, all parts on its device.
      renamed: parts that stages have: other names of stacks.
    """

    def __init__(self, dependencies: Dependencies, clusters: Sequence[OpCluster]) -> None:
        self.dependencies, self.graph = dependencies, dependencies.graph
        self.nodes = {n.index: n for n, _ in self.graph.walk()}
        self.clusters = list(clusters)
        self.runs, self.given = dict[int, tuple[int, int]](), dict[int, dict[int, int]]()
        self.variable, self._access = dict[str, tuple[int, str]](), dict[str, tuple[int, str]]()
        self._made = dict[int, TensorMaker]()
        for number, cluster in enumerate(clusters):
            for member in cluster.members:
                self._member(number, member, cluster.members[0])
        for node in dependencies.live:
            if isinstance(node.op, Feed | Read) and node.outputs[0] not in self._made:
                self.clusters.append(self._alone(node))
                self._member(len(self.clusters) - 1, (node.index,), (node.index,))
        self.gathered = dict(self._gathered())
        self.parts = {
            inner: (outer, 1 if block.spread else self.graph.tensor(outer).shape.sizes[0])
            for block in self.graph.blocks
            for outer, inner in block.sliced
        }

        spread = (block for block in self.graph.blocks if block.spread)
        self.renamed = {inner for block in spread for _, inner in block.sliced}

    def source(self, tensor: int) -> TensorMaker | None:
        """The origin of a tensor; for a part of a stack, that of the stack. None: no cluster makes it."""
        share = 1.0
        while tensor not in self._made and tensor in self.parts:
            tensor, n = self.parts[tensor]
            share /= n
        found = self._made.get(tensor)
        return None if found is None else found._replace(share=share)

    def alike(self, cluster: int, tensors: Set[int]) -> dict[int, bool]:
        """The tensors of a cluster that represent some of these, and whether they represent no other."""
        found, members = defaultdict[int, set[bool]](set), self.clusters[cluster].members
        for number, like in (pair for member in members for pair in zip(member, members[0], strict=True)):
            node, rep = self.nodes[number], self.nodes[like]
            leads = zip(*(map(self.dependencies.leads_to, _own(each)) for each in (node, rep)), strict=True)
            for names in ((node.inputs, rep.inputs), (node.outputs, rep.outputs), *leads):
                for mine, there in zip(*names, strict=False):
                    found[there].add(mine in tensors)
        return {t: len(each) == 1 for t, each in found.items() if True in each}

    def _member(self, cluster: int, member: Sequence[int], first: Sequence[int]) -> None:
        inside: dict[int, int] = {}
        for number, like in zip(member, first, strict=True):
            node, rep = self.nodes[number], self.nodes[like]
            self.runs.setdefault(number, (cluster, like))
            self.given.setdefault(number, inside)
            inside.update(zip(node.inputs, rep.inputs, strict=True))
            if isinstance(node.op, Read | Assign) and isinstance(rep.op, Read | Assign):
                names = cluster, rep.op.variable.name
                self.variable.setdefault(node.op.variable.name, names)
                if isinstance(node.op, Read):
                    self._access.setdefault(node.op.variable.name, names)
            for a, b in zip(_own(node), _own(rep), strict=True):
                leads = map(self.dependencies.leads_to, (a, b))
                for mine, there in zip(*leads, strict=False):
                    self._made.setdefault(mine, TensorMaker(cluster, there))

    def _alone(self, node: Node) -> OpCluster:
        """A node that no cluster has, as one."""
        dims, further = self.graph.tensor(node.outputs[0]).shape.names, self.dependencies.further
        every, shapes = (*dims, *rules_of(dims, further)), (dims, *pairs_of(dims, further))
        subgraph = subgraph_of(self.dependencies, [node])
        return OpCluster(node.op.name, subgraph, {}, every, (), shapes, members=((node.index,),))

    def _gathered(self) -> Iterator[tuple[tuple[int, int], TensorMaker]]:
        body = {n.body.id: n.index for n in self.nodes.values() if n.body is not None}
        for name, (cluster, first) in self._access.items():
            found, there = (sorted(self.dependencies.accesses(v)) for v in (name, first))
            for (block, _, tensor, _), (*_, like, _) in zip(found, there, strict=True):
                yield (body.get(block, 0), tensor), TensorMaker(cluster, like)


def _own(node: Node) -> tuple[int, ...]:
    """What a node makes itself: of a loop its state, what else it hands out is made in its body."""
    if node.body is None:
        return node.outputs
    state = node.body.carry_in
    return (*node.outputs[: len(state)], *state)

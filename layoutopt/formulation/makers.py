"""The cluster that makes each tensor of a step, and the tensor's name there.

Equal clusters are lowered once: a tensor of any of them is read off the first one, where the tensor at the
same place represents it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from layoutopt.formulation.cluster import Cluster
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.space.sequence_parallel import written
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.structure import Assign, Feed, Read
from mesh_tf_core.lower import Subgraph


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

    def __init__(self, dependencies: Dependencies, clusters: Sequence[Cluster]) -> None:
        self.dependencies, self.graph = dependencies, dependencies.graph
        self.nodes = {n.index: n for n, _ in self.graph.walk()}
        self.clusters = list(clusters)
        self.runs: dict[int, tuple[int, int]] = {}
        self.given: dict[int, dict[int, int]] = {}
        self.variable: dict[str, tuple[int, str]] = {}
        self._made: dict[int, TensorMaker] = {}
        self._access: dict[str, tuple[int, str]] = {}
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
            if block.dim is not None
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

    def home(self, node: int) -> list[Block]:
        """The block of a node, and those around it, the innermost first."""
        found = [self.dependencies.block_of[node]]
        while found[-1].parent is not None:
            found.append(self.graph.blocks[found[-1].parent])
        return found

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

    def _alone(self, node: Node) -> Cluster:
        """A node that no cluster has, as one."""
        block, blocks = self.dependencies.block_of[node.index], set[int]()
        while block.parent is not None:
            blocks.add(block.id)
            block = self.graph.blocks[block.parent]
        dims = self.graph.tensor(node.outputs[0]).shape.names
        subgraph = Subgraph(frozenset({node.index}), frozenset(blocks))
        further = [(n, written(n)) for n in dims if n in self.dependencies.further]
        every, shapes = (*dims, *(rule for _, rule in further)), (dims, *further)
        return Cluster(node.op.name, subgraph, {}, every, (), shapes, members=((node.index,),))

    def _gathered(self) -> Iterator[tuple[tuple[int, int], TensorMaker]]:
        body = {n.body.id: n.index for n in self.nodes.values() if n.body is not None}
        for name, (cluster, first) in self._access.items():
            found, there = (sorted(self.dependencies.accesses(v)) for v in (name, first))
            for (block, _, tensor), (*_, like) in zip(found, there, strict=True):
                yield (body.get(block, 0), tensor), TensorMaker(cluster, like)


def _own(node: Node) -> tuple[int, ...]:
    """What a node makes itself: of a loop its state, what else it hands out is made in its body."""
    if node.body is None:
        return node.outputs
    state = node.body.carry_in
    return (*node.outputs[: len(state)], *state)

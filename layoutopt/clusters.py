"""Clusters: the smallest groups of operations whose prices add up to the price of the whole program.

Lowering treats most operations alone. The exceptions couple operations, and a cluster holds together what they couple:
a sum that may wait behind linear operations (pass `pending sums`), also out of a loop. A cluster is lowered by itself,
with everything around it given; equal clusters (unrolled layers) are priced once, with a multiplicity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from mesh_tf_core.blocks import Block, Node
from mesh_tf_core.graph import Graph
from mesh_tf_core.lower import Keep
from mesh_tf_core.op import TensorType
from mesh_tf_core.program import Program
from mesh_tf_core.structure import Assign, Feed, Read, Scan
from mesh_tf_core.tensor import Tensor


@dataclass(frozen=True)
class Cluster:
    """Operations that are priced together.

    Attributes:
      keep: what lowering keeps of the graph.
      nodes: the operations, in order.
      dims: names of all dimensions of their inputs and outputs.
      shapes: dimension names of every tensor that they touch; a legal layout uses an axis once in each.
      early: outputs that are read before the update (they cannot wait for other messages).
      multiplicity: how many equal clusters the graph has.
    """

    keep: Keep
    nodes: tuple[Node, ...]
    dims: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    early: Mapping[str, Tensor]
    multiplicity: int = 1

    @property
    def name(self) -> str:
        """The scope and operation of the first node."""
        first = self.nodes[0]
        return f"{first.scope or 'model'}/{first.op.name}" + (" (backward)" if first.phase == "backward" else "")


def clusters(graph: Graph, program: Program) -> list[Cluster]:
    """The clusters of a graph, equal ones merged.

    Args:
      program: the graph lowered under any layout; operations that it does not have are dead and left out.
    """
    live = {instr.origin.node for instr, _ in program.walk()}
    view = _View(graph, live)
    groups: dict[int, list[Node]] = defaultdict(list)
    for node, _ in graph.walk():
        if node.index in live and not isinstance(node.op, Feed | Read | Assign):
            groups[view.root(node.index)].append(node)
    merged: dict[Hashable, list[list[Node]]] = defaultdict(list)
    for nodes in groups.values():
        merged[view.signature(nodes)].append(nodes)
    return [view.cluster(found[0], len(found)) for found in merged.values()]


class _View:
    def __init__(self, graph: Graph, live: set[int]) -> None:
        self.graph, self.live = graph, live
        self.parent: dict[int, int] = {}
        self.home: dict[int, Block] = {}
        self.readers: dict[int, list[Node]] = defaultdict(list)
        self.outer: dict[int, list[int]] = defaultdict(list)
        self.leaving: set[int] = set()
        for node, _ in graph.walk():
            for i in node.inputs:
                if node.index in live:
                    self.readers[i].append(node)
        for block in graph.blocks:
            for node in block.nodes:
                self.home[node.index] = block
            for inner, out in (*block.stacked, *block.summed, *block.saved.items()):
                self.outer[inner].append(out)
            self.leaving.update(block.carry_out)
        self.pends: set[int] = set()
        self._couple()

    # -- which sums may wait ---------------------------------------------------------------------------------------

    def _couple(self) -> None:
        for node, _ in self.graph.walk():
            if node.index not in self.live or isinstance(node.op, Feed | Read | Assign | Scan):
                continue
            types = [self.graph.tensor(i).type for i in node.inputs]
            waits = node.op.linear and bool(node.inputs) and all(self._waits(i, node) for i in node.inputs)
            if waits:
                for i in node.inputs:
                    self._join(self._maker(i).index, node.index)
            roles = node.op.roles(*types)
            if waits or (roles.reduced and roles.combine == "sum"):
                self.pends.update(node.outputs)

    def _waits(self, tensor: int, reader: Node) -> bool:
        """Whether `tensor` may reach its only reader as a pending sum."""
        inner = self._inner(tensor)
        if inner not in self.pends or len(self.readers[tensor]) != 1 or tensor in self.leaving:
            return False
        if inner != tensor and (self.readers[inner] or len(self.outer[inner]) != 1):
            return False
        if inner == tensor and self.outer[tensor]:
            return False
        return (self._maker(tensor).phase == "update") == (reader.phase == "update")

    def _inner(self, tensor: int) -> int:
        """The body tensor that a loop's stacked or summed result comes from, or the tensor itself."""
        node = self.graph.producer.get(tensor)
        while node is not None and node.body is not None:
            pairs = {out: inner for inner, out in (*node.body.stacked, *node.body.summed)}
            if tensor not in pairs:
                break
            tensor = pairs[tensor]
            node = self.graph.producer.get(tensor)
        return tensor

    def _maker(self, tensor: int) -> Node:
        return self.graph.producer[self._inner(tensor)]

    def root(self, index: int) -> int:
        while self.parent.get(index, index) != index:
            index = self.parent[index]
        return index

    def _join(self, a: int, b: int) -> None:
        self.parent[self.root(a)] = self.root(b)

    # -- clusters --------------------------------------------------------------------------------------------------

    def signature(self, nodes: list[Node]) -> Hashable:
        """Equal for clusters with the same operations on the same types, connected and repeated alike."""
        position: dict[int, int] = {}
        parts: list[Hashable] = []
        for node in nodes:
            types = []
            for i in (*node.inputs, *node.outputs):
                position.setdefault(i, len(position))
                types.append((position[i], self.graph.tensor(i).type))
            leaves = tuple(len(self.outer[o]) for o in node.outputs)
            late = tuple(self._late(o) for o in node.outputs)
            phase = node.phase == "update"
            parts.append((node.op, tuple(types), self._times(node), leaves, late, phase, isinstance(node.op, Scan)))
        if any(isinstance(n.op, Scan) for n in nodes):
            parts.append(nodes[0].index)
        return tuple(parts)

    def _times(self, node: Node) -> tuple[int, ...]:
        block, times = self.home[node.index], []
        while block.dim is not None and block.parent is not None:
            times.append(block.dim.size)
            block = self.graph.blocks[block.parent]
        return tuple(times)

    def _late(self, tensor: int) -> bool:
        """Whether only the update reads a tensor, directly or stacked by a loop."""
        readers = [n for t in (tensor, *self.outer[tensor]) for n in self.readers[t]]
        return bool(readers) and all(n.phase == "update" for n in readers) and tensor not in self.leaving

    def cluster(self, nodes: list[Node], multiplicity: int) -> Cluster:
        types: dict[TensorType, None] = {}
        early: dict[str, Tensor] = {}
        for node in nodes:
            for i in (*node.inputs, *node.outputs):
                types[self.graph.tensor(i).type] = None
            for o in node.outputs:
                for t in (o, *self.outer[o]):
                    if not self._late(t) and not self.graph.tensor(t).block:
                        early[f"%{t}"] = self.graph.tensor(t)
        shapes = tuple(dict.fromkeys(t.shape.names for t in types))
        dims = tuple(dict.fromkeys(n for names in shapes for n in names))
        blocks: set[int] = set()
        for node in nodes:
            block = self.home[node.index]
            while block.parent is not None:
                blocks.add(block.id)
                block = self.graph.blocks[block.parent]
        keep = Keep(frozenset(n.index for n in nodes), frozenset(blocks))
        return Cluster(keep, tuple(nodes), dims, shapes, early, multiplicity)

"""Copies of graphs, as they are or with operations that work on a part of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mesh_tf_core.ir.blocks import Block, Half, KnownTensor, Node
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor, having
from mesh_tf_core.tracing.graph import Graph


def batch_names(graph: Graph, batch: str) -> set[str]:
    """The batch dimension's name and those that operations rename it to."""
    names = {batch}
    while True:
        more = {new for node, _ in graph.walk() for old, new in node.op.renames if old in names}
        if more <= names:
            return names
        names |= more


class Copy:
    """A copy of a graph under construction.

    Attributes:
      sizes: dimensions that have other sizes in the copy -> what they are there.
      number: of the part that the nodes that are being built work on, an int scalar; None: on no part.
      tensors: old tensor -> its copy, for tensors that the new nodes may read.
      blocks: the same of blocks.
    """

    def __init__(self, graph: Graph, new: Graph | None = None) -> None:
        self.old = graph
        self.new = Graph(graph.name) if new is None else new
        self.new.variables.update(graph.variables)
        self.new.unsplit.update(graph.unsplit)
        self.new.to_the_end = graph.to_the_end
        self.new.places = graph.places
        self.number: Tensor | None = None
        self.sizes: Mapping[Dim, Dim] = {}
        self.tensors: dict[int, Tensor] = {}
        self.blocks: dict[int, Block] = {}

    def _operands(self, node: Node) -> list[Tensor]:
        """The copies of a node's operands."""
        return [self.tensors[i] for i in node.inputs]

    def _shape(self, shape: Shape) -> Shape:
        """The shape of a copy."""
        return Shape(self.sizes.get(d, d) for d in shape) if self.sizes else shape

    def _substituted(self, value: Any) -> Any:
        """The same description with the other sizes."""
        if isinstance(value, Dim):
            return self.sizes.get(value, value)
        if isinstance(value, Shape):
            return self._shape(value)
        if isinstance(value, tuple):
            return tuple(self._substituted(v) for v in value)
        if isinstance(value, TensorType):
            return TensorType(self._shape(value.shape), value.dtype)
        return value

    def _ends(self, node: Node, body: Block) -> list[Tensor]:
        """The states that an iteration hands on."""
        return [self.tensors[i] for i in body.carry_out]

    def _op(self, op: Any) -> Any:
        """The operation of a copy."""
        if not self.sizes:
            return op
        changed = {f.name: self._substituted(getattr(op, f.name)) for f in dataclasses.fields(op)}
        same = all(changed[n] == getattr(op, n) for n in changed)
        return op if same else dataclasses.replace(op, **changed)

    def _applied(self, op: Op, inputs: Sequence[Tensor], node: Node) -> tuple[Tensor, ...]:
        """What an operation makes, in place of a node."""
        made = self.new.apply(op, *inputs)
        return made if isinstance(made, tuple) else (made,)

    def _node(self, node: Node) -> None:
        with self.new.phase(node.phase, node.scope, node.name, node.call):
            if node.body is not None:
                self._looped(node, node.body, self._operands(node))
                return
            if isinstance(node.op, KnownTensor):
                (self.tensors[node.outputs[0]],) = self._operands(node)
                return
            made = self._applied(self._op(node.op), self._operands(node), node)
            self.tensors.update(zip(node.outputs, made, strict=True))

    def _inner(self, block: Block, tensor: int) -> Tensor:
        """A body tensor that no node computes: a carry or a part."""
        found = self.new.body_input(block, self.old.tensor(tensor))
        found.type = TensorType(self._shape(found.shape), found.dtype)
        self.tensors[tensor] = found
        return found

    def _delivered(self, tensor: int, source: int) -> Tensor:
        """The copy of what a loop makes a tensor of."""
        return self.tensors[source]

    def _outer(self, tensor: int, block: Block, inner: Tensor, delivers: bool = True) -> int:
        """The copy of a tensor that a loop makes of an inner one for the block around it.

        Args:
          delivers: notes the variable of a gradient.
        """
        if tensor not in self.tensors:
            dims = (block.dim, *inner.shape) if tensor < 0 else self._shape(self.old.tensor(tensor).shape)
            made = self.new.new_tensor(TensorType(Shape(dims), inner.dtype), self.new.outside(block))
            self.tensors[tensor] = made
            if delivers and tensor in self.old.gradient_of:
                self.new.deliver([(made, self.old.gradient_of[tensor])])
        return self.tensors[tensor].id

    def _looped(self, node: Node, body: Block, init: Sequence[Tensor]) -> None:
        """The copy of a loop that begins with the states `init`."""
        forward = self.blocks.get(body.forward.id) if body.forward else None
        assert body.index is not None
        (dim,) = self._shape(Shape([body.dim]))
        with self.new.loop(dim, body.reverse, forward) as block:
            self.blocks[body.id] = block
            self.tensors[body.index] = self.new.number(block)
            block.branch, block.single, block.begin = body.branch, body.single, body.begin
            block.sliced += [(self.tensors[o].id, self._inner(block, i).id) for o, i in body.sliced]
            block.carry_in = tuple(self._inner(block, i).id for i in body.carry_in)
            ends = (body.runs, body.first)
            block.runs, block.first = (None if i is None else self.tensors[i].id for i in ends)
            self._begun(body, block)
            made: dict[int, list[Node]] = {}
            for inner in body.nodes:
                begin = len(block.nodes)
                self._node(inner)
                made[inner.index] = block.nodes[begin:]
            block.carry_out = tuple(x.id for x in self._ends(node, body))
            copies = ((h, tuple(new for old in h.nodes for new in made[old.index])) for h in body.halves)
            ids = ((self.tensors[h.argument].id, self.tensors[h.result].id, each) for h, each in copies)
            block.halves = tuple(Half(*each) for each in ids)
            self._results(body, block)
        finals = self.new.close_loop(block, init)
        self.tensors.update(zip(node.outputs, finals, strict=False))

    def _results(self, body: Block, block: Block) -> None:
        """What a loop makes for the block around it, and for its backward."""
        stacked = [(self._delivered(o, i), o) for i, o in body.stacked]
        block.stacked = [(x.id, self._outer(o, block, x)) for x, o in stacked]
        summed = [(self.tensors[i], o) for i, o in body.summed]
        block.summed = [(x.id, self._outer(o, block, x)) for x, o in summed]
        pairs = body.captured.items() if block.forward is not None else ()
        known = ((a, b) for a, b in pairs if a in self.tensors and b in self.tensors)
        block.captured = {self.tensors[a].id: self.tensors[b].id for a, b in known}
        saved = [(self.tensors[i], o) for i, o in body.saved.items()]
        block.saved = {x.id: self._outer(o, block, x) for x, o in saved}

    def _begun(self, body: Block, block: Block) -> None:
        """What is to be done with a copied loop, and its state, before its nodes are copied."""


class CopiedTensors(dict[int, Tensor]):
    """Old tensors -> their copies; of others what `find` finds, once something reads them."""

    def __init__(self, known: Mapping[int, Tensor], find: Callable[[int], Tensor]) -> None:
        super().__init__(known)
        self.find = find

    def __missing__(self, old: int) -> Tensor:
        found = self[old] = self.find(old)
        return found


class Replay(Copy):
    """Nodes of an earlier block, built again in the graph's current one.

    Random keys are ordinary operations, so random numbers are the same as in the first run.

    Attributes:
      nodes: the new nodes of the current block.
    """

    def __init__(self, graph: Graph, given: Mapping[int, Tensor]) -> None:
        super().__init__(graph, graph)
        self.tensors = CopiedTensors(given, lambda old: graph.visible(graph.tensor(old)))
        self.nodes: list[Node] = []

    def run(self, nodes: Iterable[Node]) -> None:
        """Builds `nodes` again, in order."""
        for node in nodes:
            self._node(node.in_phase(Phase.RECOMPUTE))
            self.nodes.append(self.new.block.nodes[-1])


class LoopedCopy(Copy):
    """A copy of a step in which loops work on microbatches, or replicas.

    Attributes:
      kept: the nodes outside of loops but for updates; with those of arrays that are not trained, which are
        the model's own (`assigning.as_updates`).
      outside: old tensor -> its copy outside of these loops, as far as it is known.
    """

    def __init__(self, graph: Graph, *given: Any) -> None:
        super().__init__(graph, *given)
        own = {name for name, v in graph.variables.items() if v.own_storage and not v.trainable}
        self.kept = [n for n in graph.nodes if n.phase != Phase.UPDATE or n.scope in own]
        self.makers = {o: n for n, _ in graph.walk() for o in n.made}
        self.outside: dict[int, Tensor] = {}

    def whole(self, old: int) -> Tensor:
        """The copy of a tensor outside of the loops: of one that is the same in all iterations."""
        if old not in self.outside:
            self.outside.update(self._alone(self.makers[old], {}))
        return self.outside[old]

    def _alone(self, maker: Node, known: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What a node makes outside of the loops."""
        inside = having(self, blocks={}, tensors=CopiedTensors(known, self.whole), number=None)
        with self.new.at_root(), inside:
            self._node(maker)
            return {o: self.tensors[o] for o in maker.made}

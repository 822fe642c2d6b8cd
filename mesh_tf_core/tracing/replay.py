"""Builds nodes again: the same operations, in another block, on other tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mesh_tf_core.ir.blocks import Block, Half, Node
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.graph import Graph


class Replay:
    """Nodes of an earlier block, built again in the graph's current one.

    Random keys are ordinary operations, so random numbers are the same as in the first run.

    Attributes:
      made: old tensor -> new one, of everything that was read or computed. Tensors that no replayed node
        computes are read as the current block sees them.
      nodes: the new nodes of the current block.
    """

    def __init__(self, graph: Graph, given: Mapping[int, Tensor]) -> None:
        self.graph = graph
        self.made: dict[int, Tensor] = dict(given)
        self.nodes: list[Node] = []

    def run(self, nodes: Iterable[Node]) -> None:
        """Builds `nodes` again, in order."""
        self.nodes += [self._node(node) for node in nodes]

    def tensor(self, old: int) -> Tensor:
        """The new tensor in place of a tensor of the first run."""
        if old not in self.made:
            self.made[old] = self.graph.visible(self.graph.tensor(old))
        return self.made[old]

    def _node(self, node: Node) -> Node:
        with self.graph.phase(Phase.RECOMPUTE, node.scope, node.name):
            inputs = [self.tensor(i) for i in node.inputs]
            if node.body is not None:
                self._loop(node, node.body, inputs)
            else:
                result = self.graph.apply(node.op, *inputs)
                self._enter(node, result if isinstance(result, tuple) else (result,))
            return self.graph.block.nodes[-1]

    def _enter(self, node: Node, outputs: Iterable[Tensor]) -> None:
        self.made.update(zip(node.outputs, outputs, strict=True))

    def _loop(self, node: Node, body: Block, init: list[Tensor]) -> None:
        graph = self.graph
        assert body.dim is not None and body.index is not None
        with graph.loop(body.dim, body.reverse) as block:
            assert block.index is not None
            self.made[body.index] = graph.tensor(block.index)
            self.made.update(
                (old, graph.body_input(block, x)) for old, x in zip(body.carry_in, init, strict=True)
            )
            self.made.update((inner, graph.slice_into(block, self.tensor(o))) for o, inner in body.sliced)
            block.runs, block.first = (
                None if i is None else self.tensor(i).id for i in (body.runs, body.first)
            )
            block.branch = body.branch
            again = {old.index: self._node(old) for old in body.nodes}
            block.carry_in = tuple(self.made[i].id for i in body.carry_in)
            block.carry_out = tuple(self.tensor(i).id for i in body.carry_out)
            block.halves = tuple(
                Half(
                    self.made[h.argument].id,
                    self.tensor(h.result).id,
                    tuple(again[old.index] for old in h.nodes),
                )
                for h in body.halves
            )
            rest = [graph.stack_output(block, self.tensor(i)) for i, _ in body.stacked]
            rest += [graph.sum_output(block, self.tensor(i)) for i, _ in body.summed]
        self._enter(node, [*graph.close_loop(block, init), *rest])

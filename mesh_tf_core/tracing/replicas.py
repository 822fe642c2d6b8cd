"""An axis that synchronises rarely (Douillard et al. 2023, "DiLoCo", algorithm 1): replicas of the variables
train separately for some steps, each on its own batches, and then synchronise.

A training step becomes graphs on the same variables, with a copy for each replica: [replica, own dims]. The
inner step, here, is the step as it was, side by side for every replica (`Block.spread`): nothing in it reads
another one's numbers. The outer steps (`tracing.outer_steps`) make one update of the common variables from
the mean progress of the replicas, so with H inner steps one sum of the variables crosses the axis in H steps.
The optimizer's state stays with its replica. State that depends on no batch and no random number, as the
number of the step, is one for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mesh_tf_core.ir.blocks import REPLICA, Node
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import Initializer, Variable
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.structure import Assign, Feed, Read
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.batch_linearity import outer_reads
from mesh_tf_core.tracing.copying import CopiedTensors, LoopedCopy
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class Alike(Initializer):
    """Every replica begins with the value of one variable."""

    one: Initializer

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        own = self.one.piece(name, sizes[1:], begin[1:], extent[1:])
        return np.broadcast_to(own, tuple(extent))


def _draws(node: Node) -> bool:
    """Whether a node, or one in its loop, makes a random key."""
    return node.op.derives_key or any(n.op.derives_key for n, _ in (node.body.walk() if node.body else ()))


class InnerStep(LoopedCopy):
    """A training step of every replica, side by side, under construction.

    Args:
      graph: of a whole step, with its updates.

    Attributes:
      own: variables of which each replica has its own: all but those whose new value no input, random number
        or own variable has a part in.
    """

    def __init__(self, graph: Graph, replicas: int) -> None:
        super().__init__(graph)
        self.dim, behind = Dim(REPLICA, replicas), set[int]()
        self.own, count = {v.name for v in graph.variables.values() if v.trainable}, -1
        while count < len(self.own):
            count = len(self.own)
            for node in graph.nodes:
                op = node.op
                begins = isinstance(op, Feed) or (isinstance(op, Read) and op.variable.name in self.own)
                if begins or _draws(node) or not behind.isdisjoint(outer_reads(graph, node)):
                    behind.update(node.made)
                    self.own.update([op.variable.name] if isinstance(op, Assign) else ())

    def run(self, results: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
        """The new graph and its results [replica, their dims], of some at the top level by name; inputs are
        [replica, their dims]."""
        old, new, made = self.old, self.new, dict[str, Tensor]()
        new.variables.clear()
        for v in old.variables.values():
            new.declare(self._copies(v) if v.name in self.own else v)
        wanted, needed = {*(t.id for t in results.values()), *old.gradient_of}, set[int]()
        for node in reversed(old.nodes):
            stores = isinstance(node.op, Assign) and node.op.variable.name in self.own
            if stores or not wanted.isdisjoint(node.made):
                needed.add(node.index)
                wanted |= outer_reads(old, node)
        for node in old.nodes:
            if isinstance(node.op, Read):
                self.outside[node.outputs[0]] = new.read(new.variables[node.op.variable.name])
        with new.loop(self.dim, spread=True) as body:
            self.number, self.tensors = new.number(body), CopiedTensors({}, self.whole)
            for node in old.nodes:  # the step of one replica
                op = node.op
                if isinstance(op, Read) and op.variable.name in self.own:
                    (tensor,) = node.outputs
                    self.tensors[tensor] = new.slice_into(body, self.outside[tensor])
                elif isinstance(op, Feed):
                    fed = new.input(op.feed, [self.dim, *op.type.shape], op.type.dtype)
                    self.tensors[node.outputs[0]] = new.slice_into(body, fed)
                elif isinstance(op, Assign) and op.variable.name in self.own:
                    made[op.variable.name] = new.stack_output(body, self.tensors[node.inputs[0]])
                elif node.index in needed:
                    self._node(node)
            found = {name: new.stack_output(body, self.tensors[t.id]) for name, t in results.items()}
            new.deliver(
                (self.tensors[t], name) for t, name in old.gradient_of.items() if not old.tensor(t).block
            )
        new.close_loop(body, [])
        for node in old.nodes:
            if isinstance(node.op, Assign):
                with new.phase(node.phase, node.scope):
                    name, value = node.op.variable.name, node.inputs[0]
                    new.assign(new.variables[name], made[name] if name in made else self.whole(value))
        return new, found

    def _applied(self, op: Op, inputs: Sequence[Tensor], node: Node) -> tuple[Tensor, ...]:
        """Every replica derives keys of its own, with its number."""
        if op.derives_key and self.number is not None and not any(map(self._derived, node.inputs)):
            inputs = [*inputs, self.number]
        return super()._applied(op, inputs, node)

    def _derived(self, tensor: int) -> bool:
        node = self.old.producer.get(tensor)
        return node is not None and node.op.derives_key

    def _copies(self, v: Variable) -> Variable:
        return replace(
            v, shape=Shape([self.dim, *v.shape]), initializer=Alike(v.initializer), stacked=v.stacked + 1
        )

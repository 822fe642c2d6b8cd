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
from mesh_tf_core.ir.traits import derives_key
from mesh_tf_core.tracing.batch_linearity import outer_reads
from mesh_tf_core.tracing.copying import Copy
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
    return derives_key(node.op) or any(derives_key(n.op) for n, _ in (node.body.walk() if node.body else ()))


class InnerStep(Copy):
    """A training step of every replica, side by side, under construction.

    Args:
      graph: of a whole step, with its updates.
    """

    def __init__(self, graph: Graph, replicas: int) -> None:
        super().__init__(graph)
        self.dim, self.own = Dim(REPLICA, replicas), self._own()

    def _own(self) -> set[str]:
        """Variables of which each replica has its own: all but those whose new value no input, random number
        or own variable has a part in."""
        nodes = self.old.nodes
        own = {v.name for v in self.old.variables.values() if v.trainable}
        while True:
            behind: set[int] = set()
            for node in nodes:
                op = node.op
                begins = isinstance(op, Feed) or (isinstance(op, Read) and op.variable.name in own)
                if begins or _draws(node) or not behind.isdisjoint(outer_reads(self.old, node)):
                    behind.update(node.made)
            more = {n.op.variable.name for n in nodes if isinstance(n.op, Assign) and n.inputs[0] in behind}
            if more <= own:
                return own
            own |= more

    def run(self, results: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
        """The new graph and its results [replica, their dims], of some at the top level by name; inputs are
        [replica, their dims]."""
        old, new = self.old, self.new
        new.variables.clear()
        for v in old.variables.values():
            new.declare(self._copies(v) if v.name in self.own else v)
        shared = self._shared()
        for node in old.nodes:
            if node.index in shared:
                self._alone(node)
        made: dict[str, Tensor] = {}
        with new.loop(self.dim, spread=True) as body:
            assert body.index is not None
            self.number = new.tensors[body.index]
            for node in self.old.nodes:  # the step of one replica
                op = node.op
                if node.index in shared or isinstance(op, Assign):
                    continue
                if isinstance(op, Read):
                    outer = self.new.read(self.new.variables[op.variable.name])
                    own = op.variable.name in self.own
                    self.tensors[node.outputs[0]] = self.new.slice_into(body, outer) if own else outer
                elif isinstance(op, Feed):
                    fed = self.new.input(op.feed, [self.dim, *op.type.shape], op.type.dtype)
                    self.tensors[node.outputs[0]] = self.new.slice_into(body, fed)
                else:
                    self._node(node)
            for node in old.nodes:
                if isinstance(node.op, Assign) and node.index not in shared:
                    made[node.op.variable.name] = new.stack_output(body, self.tensors[node.inputs[0]])
            found = {name: new.stack_output(body, self.tensors[t.id]) for name, t in results.items()}
            new.deliver(
                (self.tensors[t], name) for t, name in old.gradient_of.items() if not old.tensor(t).block
            )
        new.close_loop(body, [])
        for node in old.nodes:
            if isinstance(node.op, Assign) and node.op.variable.name in made:
                with new.phase(node.phase, node.scope):
                    new.assign(new.variables[node.op.variable.name], made[node.op.variable.name])
        return new, found

    def _applied(self, op: Op, inputs: Sequence[Tensor], node: Node) -> tuple[Tensor, ...]:
        """Every replica derives keys of its own, with its number."""
        if derives_key(op) and self.number is not None and not any(map(self._derived, node.inputs)):
            inputs = [*inputs, self.number]
        return super()._applied(op, inputs, node)

    def _derived(self, tensor: int) -> bool:
        node = self.old.producer.get(tensor)
        return node is not None and derives_key(node.op)

    def _copies(self, v: Variable) -> Variable:
        return replace(
            v, shape=Shape([self.dim, *v.shape]), initializer=Alike(v.initializer), stacked=v.stacked + 1
        )

    def _shared(self) -> set[int]:
        """The nodes that store what is one for all, and those that lead to it."""
        wanted: set[int] = set()
        found: set[int] = set()
        for node in reversed(self.old.nodes):
            stores = isinstance(node.op, Assign) and node.op.variable.name not in self.own
            if stores or not wanted.isdisjoint(node.outputs):
                found.add(node.index)
                wanted |= outer_reads(self.old, node)
        return found

    def _alone(self, node: Node) -> None:
        """A node outside of the replicas."""
        op = node.op
        if isinstance(op, Read):
            self.tensors[node.outputs[0]] = self.new.read(op.variable)
        elif isinstance(op, Assign):
            with self.new.phase(node.phase, node.scope):
                self.new.assign(op.variable, self.tensors[node.inputs[0]])
        else:
            self._node(node)

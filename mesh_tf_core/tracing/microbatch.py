"""Gradient accumulation: the forward and backward of a step as a loop over parts of the batch.

    loss(batch) = sum over j of loss(part j)     (losses are sums scaled by constants of the whole batch)

The transformed graph holds the same operations with a smaller batch dimension inside a loop over
`microbatch`; loss, metrics and gradients are summed over its iterations, gradients in the dtype of their
variables. Random keys get the number of the part. A model whose operations fix sizes derived from the batch
(a reshape that flattens it, say) cannot be split so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH, Block, Node
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.structure import Assign, Feed, Read
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Cast
from mesh_tf_core.tracing.graph import Graph


def accumulate(
    graph: Graph, batch: str, parts: int, wanted: Mapping[str, Tensor]
) -> tuple[Graph, dict[str, Tensor]]:
    """A new graph that computes `wanted` (sums over the batch) part by part.

    Args:
      graph: forward and backward operations; those of phase `update` are left out.
      batch: name of the batch dimension, the first of every input.
      wanted: name -> tensor at the top level (the loss, metrics, gradients).

    Returns:
      The new graph and its tensors for `wanted`.
    """
    return _Copy(graph, batch, parts).run(wanted)


def batch_names(graph: Graph, batch: str) -> set[str]:
    """The batch dimension's name and those that operations rename it to."""
    names = {batch}
    while True:
        more = {new for node, _ in graph.walk() for old, new in node.op.renames if old in names}
        if more <= names:
            return names
        names |= more


class _Copy:
    def __init__(self, graph: Graph, batch: str, parts: int) -> None:
        sizes = {t.shape.dim(batch).size for t in graph.inputs.values() if batch in t.shape.names}
        if len(sizes) != 1:
            raise UserError(f"microbatches: the inputs have no common dimension {batch!r}")
        self.old, self.size, self.parts = graph, sizes.pop(), parts
        if parts < 1 or self.size % parts:
            raise UserError(
                f"microbatches={parts}: {batch!r} has size {self.size}, which is not divisible by it; "
                f"choose a divisor of {self.size}"
            )
        self.smaller = {Dim(n, self.size): Dim(n, self.size // parts) for n in batch_names(graph, batch)}
        for t in graph.tensors:
            both = [d.name for d in t.shape if d in self.smaller]
            if len(both) > 1:
                raise UserError(
                    f"microbatches={parts}: a tensor [{t.shape}] has the batch twice ({' and '.join(both)}); "
                    "examples of different parts would not meet; use one microbatch"
                )
        self.new = Graph(graph.name)
        self.new.variables.update(graph.variables)
        self.tensors: dict[int, Tensor] = {}
        self.casts = {
            (n.inputs[0], n.op.dtype): n.outputs[0]
            for n, _ in graph.walk()
            if isinstance(n.op, Cast) and n.phase != "update"
        }
        self.blocks: dict[int, Block] = {}

    def run(self, wanted: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
        """Reads and inputs stay outside; everything else goes into the loop's body."""
        kept = [n for n in self.old.nodes if n.phase != "update"]
        for node in kept:
            if isinstance(node.op, Assign):
                name = node.op.variable.name
                raise UserError(
                    f"microbatches={self.parts}: variable {name!r} is assigned once per step, from the whole "
                    "batch; use one microbatch"
                )
        feeds: dict[int, Tensor] = {}
        for node in kept:
            if isinstance(node.op, Read):
                self.tensors[node.outputs[0]] = self.new.read(node.op.variable)
            elif isinstance(node.op, Feed):
                dims = [Dim(MICROBATCH, self.parts), *self._shape(node.op.type.shape)]
                feeds[node.outputs[0]] = self.new.input(node.op.feed, dims, node.op.type.dtype)
        with self.new.loop(Dim(MICROBATCH, self.parts)) as body:
            self.blocks[0] = body
            for old, outer in feeds.items():
                self.tensors[old] = self.new.slice_into(body, outer)
            for node in kept:
                if not isinstance(node.op, Read | Feed):
                    self._node(node)
            sums = {}
            for name, tensor in wanted.items():
                inner = self._delivered(tensor.id, tensor.id)
                sums[name] = self.new.sum_output(body, inner)
                if tensor.id in self.old.gradient_of:
                    self.new.deliver([(inner, self.old.gradient_of[tensor.id])])
        self.new.close_loop(body, [])
        return self.new, sums

    def _shape(self, shape: Shape) -> Shape:
        return Shape(self.smaller.get(d, d) for d in shape)

    def _substituted(self, value: Any) -> Any:
        """The same description with the smaller batch."""
        if isinstance(value, Dim):
            return self.smaller.get(value, value)
        if isinstance(value, Shape):
            return self._shape(value)
        if isinstance(value, tuple):
            return tuple(self._substituted(v) for v in value)
        if isinstance(value, TensorType):
            return TensorType(self._shape(value.shape), value.dtype)
        return value

    def _op(self, op: Any) -> Any:
        changed = {f.name: self._substituted(getattr(op, f.name)) for f in dataclasses.fields(op)}
        same = all(changed[n] == getattr(op, n) for n in changed)
        return op if same else dataclasses.replace(op, **changed)

    def _node(self, node: Node) -> None:
        with self.new.phase(node.phase, node.scope, node.name):
            if node.body is not None:
                self._scan(node, node.body)
                return
            inputs = [self.tensors[i] for i in node.inputs]
            op = self._op(node.op)
            if op.derives_key and not any(self._derived(i) for i in node.inputs):
                assert self.blocks[0].index is not None
                inputs.append(self.new.tensors[self.blocks[0].index])
            try:
                made = self.new.apply(op, *inputs)
            except UserError as error:
                raise UserError(
                    f"microbatches={self.parts}: {op.describe()} fixes the size of the batch ({error})"
                ) from None
            outs = made if isinstance(made, tuple) else (made,)
            for old, tensor in zip(node.outputs, outs, strict=True):
                if tensor.shape != self._shape(self.old.tensor(old).shape):
                    raise UserError(f"microbatches={self.parts}: {op.describe()} fixes the size of the batch")
                self.tensors[old] = tensor

    def _derived(self, tensor: int) -> bool:
        node = self.old.producer.get(tensor)
        return node is not None and node.op.derives_key

    def _inner(self, block: Block, tensor: int) -> Tensor:
        """A body tensor that no node computes: a carry or a part."""
        found = self.new.body_input(block, self.old.tensor(tensor))
        found.type = TensorType(self._shape(found.shape), found.dtype)
        self.tensors[tensor] = found
        return found

    def _delivered(self, tensor: int, source: int) -> Tensor:
        """The copy of what a tensor is made of; of a gradient's, in the dtype of its variable."""
        copy, variable = self.tensors[source], self.old.gradient_of.get(tensor)
        dtype = copy.dtype if variable is None else self.old.variables[variable].dtype
        if copy.dtype != dtype and (source, dtype) in self.casts:
            copy = self.tensors[self.casts[source, dtype]]
        return copy.cast(dtype)

    def _outer(self, tensor: int, block: Block, dtype: str | None = None) -> int:
        """The copy of a tensor that a loop gives to the block around it."""
        if tensor not in self.tensors:
            assert block.parent is not None
            t = self.old.tensor(tensor)
            type = TensorType(self._shape(t.shape), dtype or t.dtype)
            self.tensors[tensor] = self.new.new_tensor(type, self.new.blocks[block.parent])
            if tensor in self.old.gradient_of:
                self.new.deliver([(self.tensors[tensor], self.old.gradient_of[tensor])])
        return self.tensors[tensor].id

    def _scan(self, node: Node, body: Block) -> None:
        init = [self.tensors[i] for i in node.inputs]
        forward = self.blocks[body.forward.id] if body.forward else None
        assert body.dim is not None and body.index is not None
        with self.new.loop(body.dim, body.reverse, forward) as block:
            self.blocks[body.id] = block
            assert block.index is not None
            self.tensors[body.index] = self.new.tensors[block.index]
            block.carry_in = tuple(self._inner(block, i).id for i in body.carry_in)
            block.branch = body.branch
            block.sliced = [(self.tensors[o].id, self._inner(block, i).id) for o, i in body.sliced]
            block.runs = None if body.runs is None else self.tensors[body.runs].id
            for inner in body.nodes:
                self._node(inner)
            block.carry_out = tuple(self.tensors[i].id for i in body.carry_out)
            stacked = [(self._delivered(o, i), o) for i, o in body.stacked]
            block.stacked = [(x.id, self._outer(o, block, x.dtype)) for x, o in stacked]
            block.summed = [(self.tensors[i].id, self._outer(o, block)) for i, o in body.summed]
            pairs = ((a, b) for a, b in body.captured.items() if a in self.tensors and b in self.tensors)
            block.captured = {self.tensors[a].id: self.tensors[b].id for a, b in pairs}
            block.saved = {self.tensors[i].id: self._outer(o, block) for i, o in body.saved.items()}
        finals = self.new.close_loop(block, init)
        self.tensors.update(zip(node.outputs, finals, strict=False))

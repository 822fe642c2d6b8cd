"""Gradient accumulation: the forward and backward of a step as a loop over parts of the batch.

The transformed graph holds the same operations with a smaller batch dimension inside a loop over
`microbatch`. What is a sum over the batch (a loss, gradients) is summed over its iterations, gradients in the
dtype of their variables; what is made of such sums is computed from the whole ones, after the loop. Backward
may read some of them, as the number of tokens that a masked mean divides by: an earlier loop over the parts
computes these, and nothing else. `standing` says which tensor is which. Random keys get the number of the
part, the same in both loops. Variables are assigned after the loops, from whole sums.

A model whose examples meet in another way (statistics of a batch, examples against each other), or whose
operations fix sizes derived from the batch (a reshape that flattens it, say), cannot be split so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH, Block, Node
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.structure import Assign, Feed, Read
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Cast, scale
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.standing import Kind, Standings, outer_reads


def accumulate(
    graph: Graph, batch: str, parts: int, wanted: Mapping[str, Tensor]
) -> tuple[Graph, dict[str, Tensor]]:
    """A new graph that computes `wanted` part by part, as the whole batch gives it.

    Args:
      graph: forward and backward operations; those of phase `update` are left out.
      batch: name of the batch dimension, the first of every input.
      wanted: name -> tensor at the top level (the loss, metrics, gradients).

    Returns:
      The new graph and its tensors for `wanted`.

    Raises:
      UserError: parts of the batch do not give one of `wanted`, with the operation that is why.
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
    """A copy of a graph under construction.

    Attributes:
      given: old tensor -> what stands for it, of variables and of inputs without the batch.
      fed: the same of inputs in parts.
      outside: the same of what is computed outside of the loops over the parts.
      tensors: the same of what the nodes that are being built may read.
      blocks: the same of blocks; in a loop over the parts, its own is number 0.
    """

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
        names = batch_names(graph, batch)
        self.smaller = {Dim(n, self.size): Dim(n, self.size // parts) for n in names}
        for t in graph.tensors:
            both = [d.name for d in t.shape if d in self.smaller]
            if len(both) > 1:
                raise UserError(
                    f"microbatches={parts}: a tensor [{t.shape}] has the batch twice ({' and '.join(both)}); "
                    "examples of different parts would not meet; use one microbatch"
                )
        self.kept = [n for n in graph.nodes if n.phase != "update"]
        self.makers = {o: n for n in self.kept for o in self._made(n)}
        self.standings = Standings(graph, names, self.kept)
        self.new = Graph(graph.name)
        self.new.variables.update(graph.variables)
        self.new.unsplit.update(graph.unsplit)
        self.fed: dict[int, Tensor] = {}
        self.given: dict[int, Tensor] = {}
        self.outside: dict[int, Tensor] = {}
        self.tensors: dict[int, Tensor] = {}
        self.blocks: dict[int, Block] = {}
        self._reading: dict[int, bool] = {}
        self.casts = {
            (n.inputs[0], n.op.dtype): n.outputs[0]
            for n, _ in graph.walk()
            if isinstance(n.op, Cast) and n.phase != "update"
        }

    def run(self, wanted: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
        """Reads and inputs stay outside; what the parts compute goes into the bodies of loops."""
        for node in self.kept:
            if isinstance(node.op, Read):
                self.given[node.outputs[0]] = self.new.read(node.op.variable)
            elif isinstance(node.op, Feed):
                self._feed(node.op, node.outputs[0])
        stored = [(node, node.op.variable) for node in self.kept if isinstance(node.op, Assign)]
        for name, tensor in wanted.items():
            self._check(name, tensor.id)
        for node, variable in stored:
            self._check(f"what variable {variable.name!r} is assigned", node.inputs[0])
        self.outside.update(self.given)
        sums = self._sums([*(t.id for t in wanted.values()), *(node.inputs[0] for node, _ in stored)])
        early = self._early(sums)
        if early:
            self._loop(early)
        self._loop([i for i in sums if i not in self.outside])
        for node, variable in stored:
            with self.new.phase(node.phase, node.scope):
                self.new.assign(variable, self._whole(node.inputs[0]))
        return self.new, {name: self._whole(tensor.id) for name, tensor in wanted.items()}

    def _check(self, name: str, tensor: int) -> None:
        """UserError if what the parts compute does not add up to a tensor."""
        standing, why = self.standings.of(tensor), self.standings.why.get(tensor, "")
        if standing.kind in (Kind.MIXED, Kind.ROWS):
            raise UserError(
                f"microbatches={self.parts}: parts of the batch do not add up to {name}, because of {why}; "
                "use one microbatch"
            )
        if standing.after > (1 if standing.kind is Kind.SUM else 2):
            raise UserError(
                f"microbatches={self.parts}: {name} takes sums over the whole batch, one after the other, "
                f"because of {why}; use one microbatch"
            )

    def _feed(self, op: Feed, old: int) -> None:
        dims = list(self._shape(op.type.shape))
        if self.standings.of(old).kind is Kind.ROWS:
            self.fed[old] = self.new.input(op.feed, [Dim(MICROBATCH, self.parts), *dims], op.type.dtype)
        else:
            self.given[old] = self.new.input(op.feed, dims, op.type.dtype)

    # -- which sums are taken when ---------------------------------------------------------------------------

    def _sums(self, tensors: Iterable[int]) -> list[int]:
        """What the parts add up of tensors outside of the loops, or of what they are made of."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        left = list(tensors)
        while left:
            tensor = left.pop(0)
            if tensor in seen or tensor in self.given:
                continue
            seen.add(tensor)
            if self.standings.of(tensor).kind is Kind.SUM or self._only_inside(tensor):
                found[tensor] = None
            else:
                left += sorted(outer_reads(self.old, self.makers[tensor]))
        return list(found)

    def _only_inside(self, tensor: int) -> bool:
        """Whether a loop computes a tensor beside others for which it reads the rows."""
        maker = self.makers.get(tensor)
        if maker is None or maker.body is None:
            return False
        if maker.index not in self._reading:
            read = outer_reads(self.old, maker, self._is_whole)
            self._reading[maker.index] = any(self.standings.of(i).kind is not Kind.SAME for i in read)
        return self._reading[maker.index]

    def _is_whole(self, node: Node, operand: int) -> bool:
        """Whether an operand, as a node in a loop over the parts reads it, is computed outside: it is made of
        whole sums."""
        made = [] if node.body else [self.standings.of(o) for o in node.outputs]
        if made and all(s.kind is Kind.MIXED or s.after > 1 for s in made):
            return False  # Nothing that is wanted reads it.
        if operand in self.standings.whole.get(node.index, ()):
            return True
        found, inside = self.standings.of(operand), self.old.tensor(operand).block
        return found.kind is Kind.SAME and found.after > 0 and not inside and not self._only_inside(operand)

    def _needed(self, sums: Iterable[int]) -> list[Node]:
        """The nodes that a loop over the parts runs to add up `sums`, in order."""
        wanted, found = set(sums), []
        for node in reversed(self.kept):
            if not isinstance(node.op, Read | Feed) and not wanted.isdisjoint(self._made(node)):
                found.append(node)
                wanted |= outer_reads(self.old, node, self._is_whole)
        return found[::-1]

    def _early(self, sums: Iterable[int]) -> list[int]:
        """The sums that have to be whole before the loop that adds up `sums`."""
        read: set[int] = set()
        for node in self._needed(sums):
            read |= outer_reads(self.old, node) - outer_reads(self.old, node, self._is_whole)
        return self._sums(sorted(read))

    def _made(self, node: Node) -> set[int]:
        return {*node.outputs, *(node.body.saved.values() if node.body else ())}

    # -- building --------------------------------------------------------------------------------------------

    def _loop(self, sums: Iterable[int]) -> None:
        """A loop over the parts that adds up `sums`: afterwards they are known outside."""
        made = {}
        with self.new.loop(Dim(MICROBATCH, self.parts)) as body:
            self.blocks, self.tensors = {0: body}, dict(self.given)
            for old, outer in self.fed.items():
                self.tensors[old] = self.new.slice_into(body, outer)
            for node in self._needed(sums):
                self._node(node)
            for old in sums:
                inner = self._delivered(old, old)
                if self.standings.of(old).kind is Kind.SAME:
                    inner = scale(inner, 1 / self.parts)
                made[old] = self.new.sum_output(body, inner)
                if old in self.old.gradient_of:
                    self.new.deliver([(inner, self.old.gradient_of[old])])
        self.new.close_loop(body, [])
        self.outside.update(made)

    def _whole(self, old: int) -> Tensor:
        """A tensor outside of the loops, made of whole sums."""
        if old not in self.outside:
            maker = self.makers[old]
            for i in sorted(outer_reads(self.old, maker)):
                self._whole(i)
            inside = self.blocks, self.tensors
            self.blocks, self.tensors = {}, dict(self.outside)
            with self.new.at_root():
                self._node(maker)
            self.outside.update({o: self.tensors[o] for o in self._made(maker)})
            self.blocks, self.tensors = inside
        return self.outside[old]

    def _operand(self, node: Node, operand: int) -> Tensor:
        """The copy of an operand of a node."""
        return (
            self._whole(operand)
            if 0 in self.blocks and self._is_whole(node, operand)
            else self.tensors[operand]
        )

    def _operands(self, node: Node) -> list[Tensor]:
        """The copies of a node's operands; shares of what every part would add whole."""
        found = [self._operand(node, i) for i in node.inputs]
        shared = self.standings.shared.get(node.index, ()) if 0 in self.blocks else ()
        return [scale(x, 1 / self.parts) if n in shared else x for n, x in enumerate(found)]

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

    def _ends(self, node: Node, body: Block) -> list[Tensor]:
        """The states that an iteration hands on."""
        shared = self.standings.shared_out[node.index] if 0 in self.blocks else ()
        found = [self.tensors[i] for i in body.carry_out]
        return [scale(x, 1 / self.parts) if n in shared else x for n, x in enumerate(found)]

    def _op(self, op: Any) -> Any:
        changed = {f.name: self._substituted(getattr(op, f.name)) for f in dataclasses.fields(op)}
        same = all(changed[n] == getattr(op, n) for n in changed)
        return op if same else dataclasses.replace(op, **changed)

    def _node(self, node: Node) -> None:
        with self.new.phase(node.phase, node.scope, node.name):
            if node.body is not None:
                self._scan(node, node.body)
                return
            inputs = self._operands(node)
            op = self._op(node.op)
            if op.derives_key and 0 in self.blocks and not any(self._derived(i) for i in node.inputs):
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
        made = self.casts.get((source, dtype))
        if copy.dtype != dtype and made in self.tensors:
            return self.tensors[made]
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
        init = self._operands(node)
        forward = self.blocks.get(body.forward.id) if body.forward else None
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
            block.carry_out = tuple(x.id for x in self._ends(node, body))
            stacked = [(self._delivered(o, i), o) for i, o in body.stacked]
            block.stacked = [(x.id, self._outer(o, block, x.dtype)) for x, o in stacked]
            block.summed = [(self.tensors[i].id, self._outer(o, block)) for i, o in body.summed]
            pairs = ((a, b) for a, b in body.captured.items() if a in self.tensors and b in self.tensors)
            block.captured = {self.tensors[a].id: self.tensors[b].id for a, b in pairs}
            block.saved = {self.tensors[i].id: self._outer(o, block) for i, o in body.saved.items()}
        finals = self.new.close_loop(block, init)
        self.tensors.update(zip(node.outputs, finals, strict=False))

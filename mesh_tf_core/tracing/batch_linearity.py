"""The dependence of a step's tensors on the batch, and the values that each needs: a step in parts (see
`microbatch`) needs these to compute the same results as the whole one.

  REPLICATED    in every part the same: made of variables and numbers, or of whole sums
  PER_EXAMPLE   it has the batch dimension; row b is made of row b of the inputs and of what is the same
  REDUCIBLE     each part computes a term of it, and the terms add up to it
  INSEPARABLE   anything else: no part can compute it

Linear operations make sums of sums. Whatever else reads a sum has to wait until it is whole: a masked mean
a / b = sum(ce * valid) / sum(valid) is the same in every part once a and b are whole, its gradient in b is
- a / b^2, and its gradient in a, 1 / b, flows back to the rows. `TensorLinearity.after` counts the passes
over the parts that have to be over before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from mesh_tf_core.ir.blocks import Block, Feed, Node, Read, reads
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.tracing.graph import Graph


class Linearity(IntEnum):
    """The dependence of a tensor on the batch; of two in a sum, the larger counts."""

    REPLICATED = 0
    PER_EXAMPLE = 1
    REDUCIBLE = 2
    INSEPARABLE = 3


@dataclass(frozen=True)
class TensorLinearity:
    """The dependence of one tensor on the batch.

    Attributes:
      after: number of passes over the parts after which it can be computed.
    """

    kind: Linearity = Linearity.REPLICATED
    after: int = 0


REPLICATED = TensorLinearity()
INSEPARABLE = TensorLinearity(Linearity.INSEPARABLE)


class BatchLinearity:
    """The dependence of nodes' tensors on the batch.

    Args:
      names: of the batch dimension (see `batch_names`).

    Attributes:
      whole: by node, operands that are sums and have to be whole.
      shared: by node, positions of operands that are the same in every part, of which each part adds its
        share; for a loop, states at its beginning.
      shared_out: by loop, states at the end of an iteration, likewise.
      why: the operation because of which a tensor is INSEPARABLE, or must be delayed, and its scope.
    """

    def __init__(self, graph: Graph, names: set[str], nodes: Iterable[Node]) -> None:
        self.graph, self.names = graph, names
        self.whole: dict[int, set[int]] = {}
        self.shared: dict[int, set[int]] = {}
        self.shared_out: dict[int, set[int]] = {}
        self.why: dict[int, str] = {}
        self._found: dict[int, TensorLinearity] = {}
        for node in nodes:
            self._visit(node)

    def of(self, tensor: int) -> TensorLinearity:
        """The dependence of a tensor on the batch."""
        return self._found.get(tensor, REPLICATED)

    def _visit(self, node: Node) -> None:
        if node.body is not None:
            self._loop(node, node.body)
            return
        for o in node.outputs:
            type = self.graph.tensor(o).type
            made = self._fed(type) if isinstance(node.op, Feed) else self._made(node, type)
            self._found[o] = made
            self._explain(node, o, made)

    def _explain(self, node: Node, output: int, made: TensorLinearity) -> None:
        """Notes why a tensor is INSEPARABLE, or has to wait."""
        if made.kind is not Linearity.INSEPARABLE and not made.after:
            self.why.pop(output, None)
            return
        behind = [i for i in node.inputs if self.of(i).kind is made.kind is Linearity.INSEPARABLE]
        behind = behind or [i for i in node.inputs if made.after and self.of(i).after == made.after]
        known = [self.why[i] for i in behind if i in self.why]
        place = f" in {node.scope}" if node.scope else ""
        self.why[output] = known[0] if known else f"{node.op.describe()}{place}"

    def _fed(self, type: TensorType) -> TensorLinearity:
        return TensorLinearity(Linearity.PER_EXAMPLE if self._batch(type) else Linearity.REPLICATED)

    def _batch(self, type: TensorType) -> set[str]:
        return self.names.intersection(type.shape.names)

    def _made(self, node: Node, output: TensorType) -> TensorLinearity:
        """How an operation's output depends on the batch."""
        if isinstance(node.op, Read):
            return REPLICATED
        types = [self.graph.tensor(i).type for i in node.inputs]
        given = [self.of(i) for i in node.inputs]
        self.whole[node.index], self.shared[node.index] = set(), set()
        if any(s.kind is Linearity.INSEPARABLE for s in given):
            return INSEPARABLE
        after = max((s.after for s in given), default=0)
        sums = {i for i, s in zip(node.inputs, given, strict=True) if s.kind is Linearity.REDUCIBLE}
        read = set().union(*(self._batch(t) for t in types))
        if sums and not read and not self._batch(output):
            same = [i not in sums for i in node.inputs]
            if self._waits(node.op, same, [*types, output]):
                if node.op.linear or node.op.converts:
                    self.shared[node.index] = {n for n, other in enumerate(same) if other}
                return TensorLinearity(Linearity.REDUCIBLE, after)
        if any(self.graph.tensor(i).block for i in sums):
            return INSEPARABLE  # A sum that an iteration of a loop makes is whole after the loop only.
        if sums:
            self.whole[node.index] = sums
            after = max(after, 1 + max(self.of(i).after for i in sums))
        if not read and not self._batch(output):
            return TensorLinearity(Linearity.REPLICATED, after)
        if node.op.scales:
            return TensorLinearity(Linearity.REPLICATED, after)
        roles = node.op.roles(*types)
        if apart(node.op, roles, types, output, self.names):
            return TensorLinearity(Linearity.PER_EXAMPLE, after)
        one = len(read) == 1 and not self._batch(output) and roles.combine == "sum"
        one = one and read <= set(roles.reduced) and output.dtype != "bool"
        return TensorLinearity(Linearity.REDUCIBLE, after) if one else INSEPARABLE

    def _waits(self, op: Op, same: Sequence[bool], types: Sequence[TensorType]) -> bool:
        """Whether an operation on sums gives a sum; `same`: which operands are not."""
        *operands, output = types
        if not op.distributes(same):
            return False
        fractions = any(is_float(t.dtype) for t in operands)
        return not (not is_float(output.dtype) and (fractions or (any(same) and op.linear)))

    def _loop(self, node: Node, body: Block) -> None:
        carried = [self.of(i) for i in node.inputs]
        while True:
            self._found.update(zip(body.carry_in, carried, strict=True))
            self._found.update((inner, self.of(outer)) for outer, inner in body.sliced)
            for inner in body.nodes:
                self._visit(inner)
            runs = REPLICATED if body.runs is None else self.of(body.runs)
            pairs = zip(carried, body.carry_out, strict=True)
            new = [self._joined(runs, o, s, self.of(o)) for s, o in pairs]
            if new == carried:
                break
            carried = new
            begun = zip(body.carry_in, body.carry_out, strict=True)
            self.why.update((inner, self.why[made]) for inner, made in begun if made in self.why)
        ends = (self._of_sums(carried, node.inputs), self._of_sums(carried, body.carry_out))
        self.shared[node.index], self.shared_out[node.index] = ends
        self._found.update(zip(node.outputs, carried, strict=False))
        for inner_id, outer in body.handed:
            self._found[outer] = self._joined(runs, inner_id, self.of(inner_id))
        for inner_id, outer in (*zip(body.carry_out, node.outputs, strict=False), *body.handed):
            if inner_id in self.why:
                self.why[outer] = self.why[inner_id]
        if runs.kind is not Linearity.REPLICATED:
            self.why.update(
                dict.fromkeys(node.outputs, "a branch or loop whose condition depends on the batch")
            )

    def _of_sums(self, carried: Sequence[TensorLinearity], tensors: Sequence[int]) -> set[int]:
        """Positions of the states that are sums, but are given as the same in every part."""
        pairs = enumerate(zip(carried, tensors, strict=True))
        return {
            n
            for n, (s, i) in pairs
            if s.kind is Linearity.REDUCIBLE and self.of(i).kind is Linearity.REPLICATED
        }

    def _joined(self, runs: TensorLinearity, tensor: int, *joined: TensorLinearity) -> TensorLinearity:
        """What a loop hands on that may have come either way."""
        indivisible = not is_float(self.graph.tensor(tensor).dtype)  # Whole numbers cannot be shared out.
        kinds = {s.kind for s in joined}
        if (
            runs.kind is not Linearity.REPLICATED
            or Linearity.INSEPARABLE in kinds
            or (indivisible and kinds >= {Linearity.REPLICATED, Linearity.REDUCIBLE})
        ):
            return INSEPARABLE
        return TensorLinearity(max(kinds), max(runs.after, *(s.after for s in joined)))


def apart(op: Op, roles: Roles, inputs: Sequence[TensorType], output: TensorType, names: set[str]) -> bool:
    """True if row b of an operation's output is made of row b of its inputs.

    Args:
      names: of the batch dimension.
    """
    rows = [d.name for d in output.shape if d.name in names]
    read = {d.name for t in inputs for d in t.shape if d.name in names}
    if len(rows) != 1:
        return False
    (row,) = rows
    if not inputs or (not read and row in _named(op)):
        return False  # It numbers the rows, and would begin again in every part.
    renamed = bool(op.renames)
    if len(read) > 1 or (read and row not in read and not renamed):
        return False
    return renamed or (row in roles.parallel and row not in _named(op))


def _named(op: Any) -> set[str]:
    """Dimensions that an operation's parameters name, windows among them: along them it may move elements."""
    found: set[str] = set()
    left = [getattr(op, f.name) for f in dataclasses.fields(op)]
    while left:
        value = left.pop()
        if type(value) is tuple:
            left += value
        elif isinstance(value, str | Dim):
            found.add(value.name if isinstance(value, Dim) else value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, Shape):
            left += [getattr(value, f.name) for f in dataclasses.fields(value)]
    return found - {*op.still}


def outer_reads(
    graph: Graph,
    node: Node,
    skipped: Callable[[Node, int], bool] = lambda node, operand: False,
    blocks: Collection[int] = (0,),
) -> set[int]:
    """The tensors of the graph itself, or of some blocks, that a node reads, from inside its loop too.

    Args:
      skipped: skipped(node, operand): whether to leave out an operand of a node, or of one in its loop.
    """
    found = reads(node, lambda each: (i for i in each.inputs if not skipped(each, i)))
    return {i for i in found if graph.tensor(i).block in blocks}

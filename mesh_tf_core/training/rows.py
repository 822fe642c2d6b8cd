"""The tensors of a graph that hold one example of the batch per row, and results as sums over rows.

A result such as a loss is, in most models, a sum over the rows of the batch,

    result = sum over b of r(b)

namely if it is computed by linear operations (sums, means, scaling, additions) from tensors whose row b
depends only on row b of the inputs. `Rows.of` builds r.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.structure import Feed, Read
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ir.traits import SumRules, scales
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.shape import rename_dimension
from mesh_tf_core.tracing.batch_linearity import apart
from mesh_tf_core.tracing.copying import batch_names
from mesh_tf_core.tracing.graph import Graph


class RowDependence(IntEnum):
    """The dependence of a tensor on the rows of the batch."""

    CONSTANT = 0
    ROWS = 1
    """It has the batch dimension, and row b depends on row b of the inputs."""
    JOINED = 2
    """It lacks the batch dimension and depends on many rows."""
    MIXED = 3
    """It has rows that depend on others."""


class Rows:
    """The kinds of a graph's forward tensors.

    Args:
      batch: name of the batch dimension; `size`: of a whole batch.

    Attributes:
      why: the operation because of which the last tensor is not a sum over rows.
    """

    def __init__(self, graph: Graph, batch: str, size: int) -> None:
        self.graph, self.batch, self.size = graph, Dim(batch, size), size
        self.names = batch_names(graph, batch)
        self.kinds: dict[int, RowDependence] = {}
        self.why = ""
        self._mixing: dict[int, str] = {}
        for node in graph.nodes:
            self._visit(node)

    # -- kinds -----------------------------------------------------------------------------------------------

    def _kind(self, tensor: int) -> RowDependence:
        return self.kinds.get(tensor, RowDependence.CONSTANT)

    def _visit(self, node: Node) -> None:
        if node.body is not None:
            self._loop(node, node.body)
        elif isinstance(node.op, Feed):
            has = self.batch in node.op.type.shape.dims
            self.kinds[node.outputs[0]] = RowDependence.ROWS if has else RowDependence.CONSTANT
        elif not isinstance(node.op, Read):
            self.kinds.update((o, self._made(node, self.graph.tensor(o).type)) for o in node.outputs)
        for o in node.outputs:
            if self._kind(o) is RowDependence.MIXED:
                older = (self._mixing[i] for i in node.inputs if i in self._mixing)
                self._mixing[o] = next(older, node.op.describe())

    def _made(self, node: Node, output: TensorType) -> RowDependence:
        """The kind of an operation's output."""
        given = {self._kind(i) for i in node.inputs}
        if given <= {RowDependence.CONSTANT} or (scales(node.op) and RowDependence.MIXED not in given):
            return RowDependence.CONSTANT
        rows = [d for d in output.shape if d.name in self.names]
        if RowDependence.MIXED in given or (
            RowDependence.JOINED in given and (rows or RowDependence.ROWS in given)
        ):
            return RowDependence.MIXED
        if RowDependence.JOINED in given:
            return RowDependence.JOINED
        types = [self.graph.tensor(i).type for i in node.inputs]
        roles = node.op.roles(*types)
        if not rows:
            return RowDependence.JOINED if self.names & set(roles.reduced) else RowDependence.MIXED
        whole = rows[0].size == self.size
        return (
            RowDependence.ROWS
            if whole and apart(node.op, roles, types, output, self.names)
            else RowDependence.MIXED
        )

    def _loop(self, node: Node, body: Block) -> None:
        carried = [self._kind(i) for i in node.inputs]
        while True:
            self.kinds.update(zip(body.carry_in, carried, strict=True))
            self.kinds.update((inner, self._kind(outer)) for outer, inner in body.sliced)
            for inner in body.nodes:
                self._visit(inner)
            runs = RowDependence.CONSTANT if body.runs is None else self._kind(body.runs)
            new = [_worst(runs, k, self._kind(o)) for k, o in zip(carried, body.carry_out, strict=True)]
            if new == carried:
                break
            carried = new
        self.kinds.update(zip(node.outputs, carried, strict=False))
        for inner_id, outer in (*body.stacked, *body.summed):
            self.kinds[outer] = _worst(runs, self._kind(inner_id))

    # -- results as sums -------------------------------------------------------------------------------------

    def of(self, t: Tensor) -> Tensor | None:
        """r [batch, dimensions of t] with t = sum over batch of r; None if t is no such sum (see `why`)."""
        self.why = ""
        return self._of(t)

    def _of(self, t: Tensor) -> Tensor | None:
        if self._kind(t.id) is RowDependence.CONSTANT and is_float(t.dtype):
            return self._share(t)
        node, found = self.graph.producer.get(t.id), None
        if self._kind(t.id) is RowDependence.JOINED and node is not None and node.body is None:
            xs = [self.graph.tensor(i) for i in node.inputs]
            first = all(self._kind(x.id) < RowDependence.JOINED for x in xs)
            found = self._first(node.op, xs) if first else self._linear(node.op, xs)
        if found is None:
            self.why = self.why or self._mixing.get(t.id) or (node.op.describe() if node else "a loop")
        return found

    def _share(self, x: Tensor) -> Tensor:
        """A row's part of a constant."""
        return broadcast(x * (1 / self.size), [self.batch, *x.shape])

    def _first(self, op: Op, xs: Sequence[Tensor]) -> Tensor | None:
        """Where the batch is summed out."""
        rows, *others = {d for x in xs for d in x.shape if d.name in self.names}
        found = op.unreduced(rows, xs) if isinstance(op, SumRules) and not others else None
        return None if found is None else rename_dimension(found, rows, self.batch.name)

    def _linear(self, op: Op, xs: Sequence[Tensor]) -> Tensor | None:
        """The same operation on sums over rows, if it is linear in them."""
        constant = [self._kind(x.id) is RowDependence.CONSTANT for x in xs]
        parts = [x if c else self._of(x) for x, c in zip(xs, constant, strict=True)]
        known = [r for r in parts if r is not None]
        if len(known) < len(parts):
            return None
        if not (op.linear or op.converts):
            return op.summand(self.batch, known, constant) if isinstance(op, SumRules) else None
        known = [self._share(x) if c else x for x, c in zip(known, constant, strict=True)]
        types = [x.type for x in known]
        if self.batch.name not in op.roles(*types).parallel:
            return None
        found = self.graph.apply(op, *known)
        return found if is_float(found.dtype) else None


def _worst(runs: RowDependence, *kinds: RowDependence) -> RowDependence:
    """What a loop hands out whose iterations run or not by a value of kind `runs`."""
    return (
        RowDependence.MIXED
        if runs is not RowDependence.CONSTANT and RowDependence.ROWS in kinds
        else max(runs, *kinds)
    )

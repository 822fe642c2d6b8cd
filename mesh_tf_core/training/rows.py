"""Results of a graph as sums over the rows of the batch.

A result such as a loss is, in most models, a sum over the rows of the batch,

    result = sum over b of r(b)

namely if it is computed by linear operations (sums, means, scaling, additions) from tensors whose row b
depends only on row b of the inputs. `Rows.of` builds r.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.shape import rename_dimension
from mesh_tf_core.tracing.batch_linearity import REPLICATED, BatchLinearity, Linearity
from mesh_tf_core.tracing.copying import batch_names
from mesh_tf_core.tracing.graph import Graph


class Rows:
    """The results of a graph as sums over the rows of the batch.

    Args:
      batch: name of the batch dimension; `size`: of a whole batch.

    Attributes:
      why: the operation because of which the last tensor is not a sum over rows.
    """

    def __init__(self, graph: Graph, batch: str, size: int) -> None:
        self.graph, self.batch, self.size = graph, Dim(batch, size), size
        self.names = batch_names(graph, batch)
        self.linearity = BatchLinearity(graph, self.names, graph.nodes)
        self.why = ""

    def _constant(self, x: Tensor) -> bool:
        """True if no row has a part in a tensor."""
        return self.linearity.of(x.id) == REPLICATED

    def _own_rows(self, x: Tensor) -> bool:
        """True if row b of a tensor, if it has rows, is made of row b of the inputs."""
        found = self.linearity.of(x.id)
        return found.kind <= Linearity.PER_EXAMPLE and not found.after

    def _joined(self, x: Tensor) -> bool:
        """True if a tensor lacks the batch dimension and depends on many rows."""
        found = self.linearity.of(x.id)
        return found.kind is Linearity.REDUCIBLE or (found.kind is Linearity.REPLICATED and found.after > 0)

    def of(self, t: Tensor) -> Tensor | None:
        """r [batch, dimensions of t] with t = sum over batch of r; None if t is no such sum (see `why`)."""
        self.why = ""
        return self._of(t)

    def _of(self, t: Tensor) -> Tensor | None:
        if self._constant(t) and is_float(t.dtype):
            return self._share(t)
        node, found = self.graph.producer.get(t.id), None
        if self._joined(t) and node is not None and node.body is None:
            xs = [self.graph.tensor(i) for i in node.inputs]
            found = (self._first if all(map(self._own_rows, xs)) else self._linear)(node.op, xs)
        if found is None:
            known = self.linearity.why.get(t.id)
            self.why = self.why or known or (node.op.describe() if node else "a loop")
        return found

    def _share(self, x: Tensor) -> Tensor:
        """A row's part of a constant."""
        return broadcast(x * (1 / self.size), [self.batch, *x.shape])

    def _first(self, op: Op, xs: Sequence[Tensor]) -> Tensor | None:
        """Where the batch is summed out."""
        rows, *others = {d for x in xs for d in x.shape if d.name in self.names}
        found = None if others else op.unreduced(rows, xs)
        return None if found is None else rename_dimension(found, rows, self.batch.name)

    def _linear(self, op: Op, xs: Sequence[Tensor]) -> Tensor | None:
        """The same operation on sums over rows, if it is linear in them."""
        constant = [*map(self._constant, xs)]
        parts = [x if c else self._of(x) for x, c in zip(xs, constant, strict=True)]
        known = [r for r in parts if r is not None]
        if len(known) < len(parts):
            return None
        if not (op.linear or op.converts):
            return op.summand(self.batch, known, constant)
        known = [self._share(x) if c else x for x, c in zip(known, constant, strict=True)]
        types = [x.type for x in known]
        if self.batch.name not in op.roles(*types).parallel:
            return None
        found = self.graph.apply(op, *known)
        return found if is_float(found.dtype) else None

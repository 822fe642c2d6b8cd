"""A model whose vocabulary, or another dimension, is longer, as software pads it to share it evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from mesh_tf_core.ir.blocks import Feed, Node, Read
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.copying import Copy
from mesh_tf_core.tracing.graph import Graph


class _PaddedCopy(Copy):
    def __init__(self, graph: Graph, dim: Dim, more: int) -> None:
        super().__init__(graph)
        self.sizes = {dim: Dim(dim.name, dim.size + more)}
        self.new.variables.update((v.name, self._substituted(v)) for v in graph.variables.values())

    def _substituted(self, value: Any) -> Any:
        if isinstance(value, Variable):
            return replace(value, shape=self._shape(value.shape))
        return super()._substituted(value)

    def _applied(self, op: Op, inputs: Sequence[Tensor], node: Node) -> tuple[Tensor, ...]:
        if isinstance(op, Read):
            return (self.new.read(op.variable),)
        if isinstance(op, Feed):
            return (self.new.input(op.feed, op.type.shape.dims, op.type.dtype),)
        return super()._applied(op, inputs, node)


def padded(model: Model, dim: str, multiple: int) -> Model:
    """The same model with a dimension of its variables as long as a multiple, and this one as `given`. One
    with gradients of its own (`custom_gradient`), which name tensors of its graph, stays as it is."""
    own = {d for v in model.graph.variables.values() for d in v.shape if d.name == dim}
    if len(own) != 1 or model.graph.gradient_functions or not (more := -max(d.size for d in own) % multiple):
        return model
    if (dim, multiple) not in model._others:
        copy, nodes = _PaddedCopy(model.graph, max(own, key=str), more), iter(model.graph.nodes)
        while not all(x.id in copy.tensors for x in (model.loss, *model.metrics.values())):
            copy._node(next(nodes))  # gradients, if there are some, come later
        metrics = {name: copy.tensors[x.id] for name, x in model.metrics.items()}
        new = replace(model, loss=copy.tensors[model.loss.id], metrics=metrics, _whole=None, _others={})
        new.given = model.given or model
        model._others[dim, multiple] = 0, new
    return cast(Model, model._others[dim, multiple][1])

"""Storing a variable changed by something, or a part of it."""

from __future__ import annotations

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.index import Range
from mesh_tf_core.ops.math import logical_and
from mesh_tf_core.ops.shape import pad, transpose
from mesh_tf_core.tracing.graph import Graph


def assign_add(graph: Graph, variable: Variable, value: Tensor) -> None:
    """Adds `value` to the variable at the end of the step."""
    graph.assign(variable, graph.read(variable) + value)


def assign_sub(graph: Graph, variable: Variable, value: Tensor) -> None:
    """Subtracts `value` from the variable at the end of the step."""
    graph.assign(variable, graph.read(variable) - value)


def assign_slice(graph: Graph, variable: Variable, value: Tensor, dim: Dim | str, begin: int) -> None:
    """Stores `value` as the elements of the variable from `begin` on along `dim`, at the end of the step.

    Args:
      value: tensor with the variable's dimensions and fewer elements along `dim`.
    """
    name = dim.name if isinstance(dim, Dim) else dim
    whole, size = variable.shape.dim(name), value.shape.dim(name).size
    if begin < 0 or begin + size > whole.size:
        raise UserError(
            f"assign to variable {variable.name!r}: elements {begin} to {begin + size - 1} of {name!r} "
            f"are outside the range 0 to {whole.size - 1}"
        )
    moved = pad(value, name, begin, whole.size - begin - size)
    place = graph.apply(Range(whole, "int32"))
    inside = logical_and(place >= begin, place < begin + size)
    graph.assign(variable, transpose(where(inside, moved, graph.read(variable)), variable.shape))

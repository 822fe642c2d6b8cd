"""Tensors of one value."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.tensor import Builder, Tensor
from mesh_tf_core.ops.basic import Constant, constant_like
from mesh_tf_core.ops.einsum import broadcast


def constant(
    graph: Builder, value: float, dims: Shape | Sequence[Dim] = (), dtype: str = "float32"
) -> Tensor:
    """A tensor whose elements all are `value`."""
    one: Tensor = graph.apply(Constant(value, dtype))
    return broadcast(one, dims)


def zeros(graph: Builder, dims: Shape | Sequence[Dim] = (), dtype: str = "float32") -> Tensor:
    """A tensor of zeros."""
    return constant(graph, 0.0, dims, dtype)


def ones(graph: Builder, dims: Shape | Sequence[Dim] = (), dtype: str = "float32") -> Tensor:
    """A tensor of ones."""
    return constant(graph, 1.0, dims, dtype)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros of the shape and dtype of x."""
    return broadcast(constant_like(x, 0.0), x.shape)


def ones_like(x: Tensor) -> Tensor:
    """Ones of the shape and dtype of x."""
    return broadcast(constant_like(x, 1.0), x.shape)

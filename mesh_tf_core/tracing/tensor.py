"""Symbolic tensors: what model code handles. Arithmetic broadcasts by dimension name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ops.basic import cast, scale
from mesh_tf_core.ops.binary import binary
from mesh_tf_core.ops.unary import unary

if TYPE_CHECKING:
    from mesh_tf_core.tracing.graph import Graph

_RETURN = "return it as a result, or run this code with mtf.Eager outside of loops and staged functions"


class Tensor:
    """A value of a graph: named dimensions and a dtype, no data and no device.

    Attributes:
      graph: the graph it belongs to.
      id: its number in the graph.
      type: shape and dtype.
      block: number of the block (loop body, or 0) whose operations compute it.
    """

    __slots__ = ("block", "graph", "id", "type")
    __array_ufunc__ = None
    """NumPy's arrays leave arithmetic to the tensor instead of applying it element by element."""

    def __init__(self, graph: Graph, id: int, type: TensorType, block: int) -> None:
        self.graph, self.id, self.type, self.block = graph, id, type, block

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    def dim(self, name: str) -> Dim:
        return self.shape.dim(name)

    def __repr__(self) -> str:
        return f"Tensor(%{self.id} {self.type})"

    def __bool__(self) -> bool:
        self._no_value("use mtf.where or mtf.scan instead of if, or run this code with mtf.Eager")

    def __float__(self) -> float:
        self._no_value(_RETURN)

    def __int__(self) -> int:
        self._no_value(_RETURN)

    def numpy(self) -> Any:
        """The whole array, of a tensor that holds its value (`mtf.Eager`)."""
        self._no_value(_RETURN)

    def shards(self) -> dict[tuple[int, ...], Any]:
        """Every device's piece, of a tensor that holds its value (`mtf.Eager`)."""
        self._no_value(_RETURN)

    def _no_value(self, advice: str) -> NoReturn:
        where = " (loops and branches are built before they are run)" if self.block else ""
        raise UserError(f"{self!r} has no value while the model is being built{where}; {advice}")

    def __add__(self, other: Tensor | float) -> Tensor:
        return binary("add", self, other)

    def __radd__(self, other: float) -> Tensor:
        return binary("add", other, self)

    def __sub__(self, other: Tensor | float) -> Tensor:
        return binary("sub", self, other)

    def __rsub__(self, other: float) -> Tensor:
        return binary("sub", other, self)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return binary("mul", self, other)

    def __rmul__(self, other: float) -> Tensor:
        return binary("mul", other, self)

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return binary("div", self, other)

    def __rtruediv__(self, other: float) -> Tensor:
        return binary("div", other, self)

    def __pow__(self, other: Tensor | float) -> Tensor:
        return binary("pow", self, other)

    def __neg__(self) -> Tensor:
        return scale(self, -1.0)

    def __lt__(self, other: Tensor | float) -> Tensor:
        return binary("lt", self, other)

    def __le__(self, other: Tensor | float) -> Tensor:
        return binary("le", self, other)

    def __gt__(self, other: Tensor | float) -> Tensor:
        return binary("gt", self, other)

    def __ge__(self, other: Tensor | float) -> Tensor:
        return binary("ge", self, other)

    def __and__(self, other: Tensor) -> Tensor:
        return binary("and", self, other)

    def __or__(self, other: Tensor) -> Tensor:
        return binary("or", self, other)

    def __invert__(self) -> Tensor:
        return unary("not", self)

    def equal(self, other: Tensor | float) -> Tensor:
        """Element-wise equality (`==` compares handles, so that tensors can be dictionary keys)."""
        return binary("eq", self, other)

    def cast(self, dtype: str) -> Tensor:
        return cast(self, dtype)


Tensors = Tensor | Sequence[Tensor]

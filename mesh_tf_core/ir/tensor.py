"""Symbolic tensors, which model code uses. Arithmetic broadcasts by dimension name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NoReturn

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.initializers import Initial, Variable
from mesh_tf_core.ir.scopes import Scopes

_RETURN = (
    "return the tensor as a result, or run this code with mtf.Eager outside of loops and staged functions"
)


class Builder(Scopes):
    """The graph as a tensor, and so model code, sees it.

    Attributes:
      gradient_functions: those that the model wrote itself (see `custom_gradient`), by number.
      unary, binary, cast: the operations behind operators between tensors.
    """

    unary: ClassVar[Callable[..., Any]]
    binary: ClassVar[Callable[..., Any]]
    cast: ClassVar[Callable[..., Any]]
    gradient_functions: list[Callable[..., Any]]

    def apply(self, op: Any, *inputs: Tensor) -> Any:
        """Appends an operation (an `Op`) to the current block; returns its output, or a tuple of them."""
        raise NotImplementedError

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make`, built once for this key in the current block."""
        raise NotImplementedError

    def maker(self, x: Tensor) -> tuple[Any, Sequence[Tensor]]:
        """The operation that made a tensor, and its operands; None and none for what a loop hands in."""
        raise NotImplementedError

    def variable(
        self,
        name: str,
        dims: Sequence[Dim],
        initializer: Initial,
        dtype: str = "float32",
        activation_dtype: str | None = None,
        trainable: bool = True,
    ) -> Tensor:
        """A trained (or only stored) tensor. Inside a scan it has one value per iteration, unless `sharing`
        was opened outside of it.

        Args:
          name: unique below the current scope.
          initializer: an initializer, a number, an array of the variable's shape, or a function (see
            `FromFunction`).
          dtype: in which it is stored and updated (the master copy).
          activation_dtype: in which the returned tensor is (None: dtype).
        """
        raise NotImplementedError

    def read(self, variable: Variable) -> Tensor:
        """The variable's value at the start of the step."""
        raise NotImplementedError

    def assign(self, variable: Variable, value: Tensor) -> None:
        """Stores `value` into the variable at the end of the step; inside a loop, every iteration's value of
        a variable that has one per iteration."""
        raise NotImplementedError

    def random_key(self, *extra: Tensor) -> Tensor:
        """A new int32 key: differs per call, per step and per iteration of the loops around it."""
        raise NotImplementedError

    def step(self) -> Tensor:
        """The number of steps done so far (int32 scalar)."""
        raise NotImplementedError


_INSTEAD = {
    **{n: f"mtf.reduce_{n}(x, dims)" for n in ("sum", "mean", "max", "min", "any", "all", "prod")},
    **dict.fromkeys(("reshape", "view", "flatten", "squeeze", "unsqueeze"), "mtf.reshape(x, dims)"),
    **dict.fromkeys(
        ("transpose", "permute", "T", "mT"), "mtf.transpose(x, dims) (mtf.einsum needs no particular order)"
    ),
    **dict.fromkeys(("matmul", "dot", "mm", "bmm"), "mtf.einsum([x, w], output)"),
    **dict.fromkeys(("astype", "to", "float", "half", "bfloat16"), "x.cast(dtype)"),
    **{n: f"mtf.{n}(x, dim)" for n in ("argmax", "argmin", "cumsum", "softmax", "sort")},
    **{n: f"mtf.{n}(x)" for n in ("abs", "exp", "log", "sqrt", "tanh", "sigmoid", "square")},
    "detach": "mtf.stop_gradient(x)",
    "ndim": "len(x.shape)",
    "size": "x.shape.size",
    "backward": "mtf.gradients(loss, [x]), or mtf.Model(loss, optimizer)",
}
"""What other libraries' tensors have -> what to write."""


def _operator(name: str, swapped: bool = False) -> Callable[[Tensor, Tensor | float], Tensor]:
    """The method of an operator between tensors; `swapped`: the tensor is on the right."""

    def method(self: Tensor, other: Tensor | float) -> Tensor:
        return self.graph.binary(name, other, self) if swapped else self.graph.binary(name, self, other)

    return method


class TensorAttributeError(UserError, AttributeError):
    """An attribute of other libraries' tensors, and its replacement."""


class Tensor:
    """A value of a graph: named dimensions and a dtype, without data and without a device.

    Attributes:
      graph: the graph of the tensor.
      id: its number in the graph.
      type: shape and dtype.
      block: number of the block (loop body, or 0) whose operations compute it.

    Example:
      >>> import mesh_tf_core as mtf
      >>> x = mtf.Graph("g").input("x", [mtf.Dim("batch", 8)], "float32")
      >>> (x * 2).shape.names, x.dtype
      (('batch',), 'float32')
    """

    __slots__ = ("block", "graph", "id", "type")
    __array_ufunc__ = None
    """NumPy's arrays leave arithmetic to the tensor instead of applying it element by element."""

    def __init__(self, graph: Builder, id: int, type: TensorType, block: int) -> None:
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
        self._no_value(
            "use mtf.where or mtf.cond instead of `if`, mtf.while_loop instead of `while`, or run this code "
            "with mtf.Eager"
        )

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
        where = " (the bodies of loops and branches are built before they run)" if self.block else ""
        raise UserError(f"{self!r} has no value while the model is being built{where}; {advice}")

    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swapped=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swapped=True)
    __pow__, __and__, __or__ = _operator("pow"), _operator("and"), _operator("or")
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))

    def __neg__(self) -> Tensor:
        return self.graph.binary("mul", self, -1.0)

    def __invert__(self) -> Tensor:
        return self.graph.unary("not", self)

    def __getitem__(self, index: Any) -> NoReturn:
        d = self.shape.names[0] if len(self.shape) else "dim"
        raise UserError(
            f"{self!r}: dimensions are indexed by name, not by position; write mtf.slice_dim(x, {d!r}, "
            f"begin, size), mtf.dynamic_slice(x, position, {d!r}) for one position, or mtf.gather(x, "
            f"ids, {d!r})"
        )

    def __iter__(self) -> NoReturn:
        raise UserError(f"{self!r} cannot be iterated; use mtf.unstack(x, dim) or mtf.scan")

    def __matmul__(self, other: Any) -> NoReturn:
        raise UserError(
            f"{self!r} @ {other!r}: dimensions are multiplied by name; write mtf.einsum([x, w], output), "
            "where output lists the dimensions of the result"
        )

    __rmatmul__ = __matmul__

    def __getattr__(self, name: str) -> NoReturn:
        if name in _INSTEAD:
            raise TensorAttributeError(f"a tensor has no attribute {name!r}; write {_INSTEAD[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def equal(self, other: Tensor | float) -> Tensor:
        """Element-wise equality (`==` compares handles, so that tensors can be dictionary keys)."""
        return self.graph.binary("eq", self, other)

    def cast(self, dtype: str) -> Tensor:
        return self.graph.cast(self, dtype)

"""Symbolic tensors, which model code uses (arithmetic broadcasts by dimension name), and the settings in
force for everything added to a graph next: names, phases, how variables are made, and the lines of the
model's own code that add it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.initializers import Initial, Initializer, Variable, initializer
from mesh_tf_core.ir.phase import Phase

Change = Callable[[str, Initializer], Initial]
Inside = AbstractContextManager[None]


@contextmanager
def having(what: object, **values: Any) -> Iterator[None]:
    """Attributes of an object have other values for what is done inside."""
    saved = {name: getattr(what, name) for name in values}
    vars(what).update(values)
    try:
        yield
    finally:
        vars(what).update(saved)


class Scopes:
    """The part of a graph that its context managers set, and the variables that are made under it."""

    name: str
    float8_loops: str = ""
    """The float8 recipe of layers in loops."""

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self._scope: list[str] = []
        self._phase = Phase.FORWARD
        self._named: str | None = None
        self._call = ""
        self._shared: int | None = None
        self._around: int | None = None
        self._frozen = False
        self._float8 = ""
        self._initial: tuple[Change, ...] = ()

    @property
    def _loops(self) -> Sequence[object]:
        """The loops around new operations, whose dimensions new variables have."""
        raise NotImplementedError

    def path(self, name: str) -> str:
        """The whole name of something below the current scope."""
        return "/".join([*self._scope, name])

    def scope(self, name: str) -> Inside:
        """Operations built inside are reported under this name; variables' names begin with it."""
        return having(self, _scope=[*self._scope, name])

    def phase(
        self, name: Phase | str, scope: str | None = None, named: str | None = None, call: str = ""
    ) -> Inside:
        """Marks operations as backward or update; `scope` replaces the path of names, `named` is the name of
        the operation that they belong to, and `call` is as of `in_call`. UserError if it is no phase."""
        if name not in {*Phase}:
            raise UserError(f"unknown phase {name!r}; {known_names(name, Phase)}")
        path = [scope] if scope else ([] if scope == "" else self._scope)
        return having(self, _phase=Phase(name), _scope=path, _named=named, _call=call)

    def in_call(self, call: str) -> Inside:
        """Operations built inside are what one call of a library computes, which has a kernel for all of
        them; "": each is a call of its own."""
        return having(self, _call=call)

    def sharing(self) -> Inside:
        """Variables made inside are shared: a loop opened inside has one value for all its iterations, and a
        name that is made again is the same variable. So one block is applied again and again:

            with graph.sharing():
                x = mtf.scan(block, x, Dim("steps", 6))
        """
        return having(self, _shared=len(self._loops) if self._shared is None else self._shared)

    def again(self) -> Inside:
        """Model code that has run before, once more: a variable that exists is the same one, whatever loops
        were opened around this since. So one layer stack is used for whole texts and, in a loop, for one
        position at a time (see `decoding`)."""
        return having(self, _around=len(self._loops))

    def frozen(self) -> Inside:
        """Variables made inside are stored but not trained, such as those of a teacher."""
        return having(self, _frozen=True)

    def float8(self, recipe: str = "tensor") -> Inside:
        """Layers built inside multiply by their weights in float8 (see `mtf.float8_einsum`); norms, softmax,
        routers and attention itself stay as they are. "" is no recipe."""
        return having(self, _float8=recipe)

    @property
    def in_float8(self) -> str:
        """The recipe by which layers multiply by their weights; "": in their own dtype."""
        return self._float8 or (self.float8_loops if self._loops else "")

    def initialized(self, change: Change) -> Inside:
        """Variables made inside start with the initializer that change(whole name, default initializer)
        returns."""
        return having(self, _initial=(change, *self._initial))

    def _changed(self, name: str, given: Initial) -> Initializer:
        """A new variable's initializer, changed from the innermost `initialized` to the outermost."""
        found = initializer(f"variable {name!r}", given)
        for change in self._initial:
            found = initializer(f"variable {name!r}", change(name, found))
        return found

    def lookup(self, name: str) -> Variable:
        """The variable of this name below the current scope, or of this whole name."""
        below = self.path(name)
        if below in self.variables:
            return self.variables[below]
        if name not in self.variables:
            raise UserError(
                f"graph {self.name!r} has no variable {name!r}; {known_names(name, self.variables)}"
            )
        return self.variables[name]

    def _shared_one(self, asked: Variable) -> Variable | None:
        """The variable of the name of one that is asked for; UserError if it may not stand for both."""
        found = self.variables.get(asked.name)
        if found is not None and self._shared is None and self._around is None:
            raise UserError(
                f"variable {asked.name!r} already exists; choose another name, use the existing "
                "variable's tensor, or make both inside graph.sharing()"
            )
        if found is not None and found.type != asked.type:
            raise UserError(
                f"variable {asked.name!r} is shared, but was made with type {found.type} and is now "
                f"requested with type {asked.type}; choose another name"
            )
        return found


MOST = 16
"""Frames that are looked through: an operation of a layer is a few calls below the model's line."""
_ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{_ROOT / name}/" for name in ("mesh_tf_core", "costmodels", "layoutopt"))


def caller() -> str:
    """'file:line' of the nearest caller outside of these packages; '' if none is near."""
    frame = sys._getframe(1)
    for _ in range(MOST):
        file = frame.f_code.co_filename
        if not file.startswith(OURS):
            return f"{file}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


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

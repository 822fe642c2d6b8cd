"""The base of writers of primitives as our operations: values by variable, dimensions by axis.

A tensor need not have all dimensions of its axes: it is constant along missing ones (a broadcast that is not
carried out), because operations broadcast by name. A number represents an array of that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from layoutopt.importers.arrays.classes import Classes, FactorNode
from layoutopt.importers.arrays.contract import (
    KEY,
    CapturedArray,
    Equation,
    EquationBlock,
    Operand,
    Unimportable,
    Var,
    is_empty,
)
from layoutopt.importers.arrays.keys import Draw, Keys, key_of, of_words
from layoutopt.importers.arrays.refusals import OTHERWISE, WIDER, Refusal, Refusals, refuse, refused, wrapped
from mesh_tf_core.ir.dims import Dim, Shape, SparseDim
from mesh_tf_core.ir.dtypes import DTYPES
from mesh_tf_core.ir.initializers import FixedArray, FromArray, Initializer, Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.random import uniform_bits
from mesh_tf_core.tracing.graph import Graph

_INSTEAD = {
    "while": "use jax.lax.scan with a fixed number of steps",
    "cond": "compute both branches and select with jnp.where",
    "pallas_call": "call a version of the kernel in plain JAX",
    "shard_map": "pass the function without shard_map, because the search decides the sharding",
    "cumprod": "use jnp.exp of the cumulative sum of the logarithms",
    "cumlogsumexp": "use jnp.log of the cumulative sum of the exponentials",
}
"""What to do without some primitives that have no rule."""


@dataclass(frozen=True)
class ScalarArray:
    """An array of one number."""

    value: Any
    dtype: str


@dataclass(frozen=True, eq=False)
class UndrawnUniform:
    """Uniform random numbers that are not drawn yet."""

    low: float
    high: float
    dims: tuple[Dim, ...]
    dtype: str
    keys: Keys


@dataclass(frozen=True)
class Kept:
    """A comparison of uniform numbers with a probability: the mask of dropout."""

    of: UndrawnUniform
    probability: float


WrittenValue = Tensor | ScalarArray | Keys | UndrawnUniform | Kept
Handler = Callable[["Writer", Equation], None]


def beginning(array: Any, shape: Shape) -> Initializer:
    """An array of a function as the initial value of a variable, with axes cut into factors."""
    return FromArray(FixedArray(np.reshape(np.asarray(array), shape.sizes)))


def our_dtype(dtype: str) -> str:
    """The element type that represents one of the function."""
    return dtype if dtype in DTYPES else WIDER.get(dtype, dtype)


class Writer:
    """Writes blocks into a graph.

    Args:
      names: class -> its name.
      table: primitive -> function that writes it; KEY -> function that writes operations on keys.

    Attributes:
      values: id of an operand -> its value.
      sparse: class of the choices of rows at experts -> their dimension.
      weights: ids of tensors that are a layer's part of a stack of parameters.
      sources: number of a node -> file and line of the user's code.
      notes: remarks for the user about parts that were left out.
      drawn_with: keys that were drawn with so far.
      refusals: operations that cannot be imported.
    """

    def __init__(
        self, graph: Graph, classes: Classes, names: Mapping[FactorNode, str], table: Mapping[str, Handler]
    ) -> None:
        self.graph, self.classes, self.names, self.table = graph, classes, names, table
        self.values: dict[int, WrittenValue] = {}
        self.sparse: dict[FactorNode, SparseDim] = {}
        self.sources: dict[int, str] = {}
        self.notes, self.weights = list[str](), set[int]()
        self.drawn_with: list[Draw] = []
        self._taken = set(names.values())
        self._dims: dict[tuple[int, int, int], tuple[Dim, ...]] = {}
        self._shapes: dict[tuple[int, int], tuple[Dim, ...]] = {}
        self._dim = cache(lambda c, n: Dim(names[c], n))
        self.refusals = Refusals()

    def dims(self, v: Operand, axis: int) -> tuple[Dim, ...]:
        """The dimensions of an axis."""
        key = id(v), axis, len(self.sparse)
        if key not in self._dims:
            pairs = zip(self.classes.of(v, axis), self.classes.factors.of(v, axis), strict=True)
            self._dims[key] = tuple(self.sparse.get(c) or self._dim(c, n) for c, n in pairs)
        return self._dims[key]

    def shape(self, v: Operand) -> tuple[Dim, ...]:
        """The dimensions of all axes."""
        key = id(v), len(self.sparse)
        if key not in self._shapes:
            self._shapes[key] = tuple(d for a in range(len(v.shape)) for d in self.dims(v, a))
        return self._shapes[key]

    def fresh(self, like: str) -> str:
        """A name that no dimension has, numbered if need be."""
        number, name = 2, like
        while name in self._taken:
            number, name = number + 1, f"{like}_{number}"
        self._taken.add(name)
        return name

    def value(self, v: Operand) -> WrittenValue:
        """The value of an operand: a tensor with dimensions of its axes, or its representation."""
        if id(v) not in self.values:
            assert isinstance(v, CapturedArray), v
            self.values[id(v)] = self._constant(v)
        return self.values[id(v)]

    def number(self, v: Operand) -> Any | None:
        """The number that an operand is everywhere, None if it is not a number."""
        found = self.value(v)
        return found.value if isinstance(found, ScalarArray) else None

    def tensor(self, v: Operand) -> Tensor:
        """The value as a tensor; of a number, a scalar."""
        return self.drawn(self.value(v), v)

    def drawn(self, found: WrittenValue, v: Operand) -> Tensor:
        """A value as a tensor."""
        match found:
            case Tensor():
                return found
            case ScalarArray():
                return mtf.constant(self.graph, found.value, (), our_dtype(found.dtype))
            case UndrawnUniform():
                # From above to below, as `dropout` keeps what is large: equal keys keep the same.
                dtype = our_dtype(found.dtype)
                least = (found.high - found.low) * 2.0 ** -uniform_bits(dtype)
                kind = found.dims, (ends := (found.high - least, found.low - least)), dtype
                made: Tensor = self.graph.once(
                    (found.keys.identity, kind),
                    lambda: mtf.random_uniform(key_of(self.graph, found.keys), found.dims, *ends, kind[2]),
                )
                return made
            case Kept():
                return self.drawn(found.of, v) < found.probability
            case Keys():
                raise mtf.UserError(
                    "arithmetic on a random key is not supported; draw with jax.random.uniform or "
                    "jax.random.normal"
                )

    def full(self, v: Operand) -> Tensor:
        """The value with all its dimensions, in order."""
        return mtf.broadcast(self.tensor(v), self.shape(v))

    def whole(self, v: Operand) -> Tensor:
        """The value with all its dimensions, in the order that it has."""
        t = self.tensor(v)
        return mtf.broadcast(t, [*(d for d in self.shape(v) if d.name not in t.shape.names), *t.shape])

    def put(self, v: Var, value: WrittenValue) -> None:
        """The value of a result."""
        if isinstance(value, Tensor):
            known = {d.name: d.size for d in self.shape(v)}
            for d in value.shape:
                assert known.get(d.name) == d.size, (v, value, known)
        self.values[id(v)] = value

    def fitted(self, x: Operand, y: Operand, axes: Iterable[tuple[int, int]]) -> WrittenValue:
        """x under the names that axes of y have: pairs (axis of x, axis of y)."""
        found = self.value(x)
        if isinstance(found, ScalarArray | Keys):
            return found
        names = self.between(x, y, axes)
        if not isinstance(found, Tensor):
            if all(old == new for old, new in names.items()):
                return found
            found = self.tensor(x)
        return self.renamed(found, names)

    def between(self, x: Operand, y: Operand, axes: Iterable[tuple[int, int]]) -> dict[str, str]:
        """Maps the dimensions of axes of x to their names in y."""
        out: dict[str, str] = {}
        for a, b in axes:
            old, new = self.dims(x, a), self.dims(y, b)
            if [d.size for d in old] == [d.size for d in new]:
                out.update((m.name, n.name) for m, n in zip(old, new, strict=True))
            elif old:
                out.update((d.name, "") for d in old)
        return out

    def renamed(self, t: Tensor, names: Mapping[str, str]) -> Tensor:
        """t with some dimensions under other names."""
        changed = {old: new for old, new in names.items() if old != new and old in t.shape.names}
        if "" in changed.values():
            raise mtf.UserError(f"it regroups the axes of [{t.shape}], which this operation must keep")
        return mtf.rename(t, **changed)

    def elementwise(self, x: Operand, y: Operand) -> WrittenValue:
        """x as an operand of an element-wise operation with result y."""
        if len(x.shape) != len(y.shape) or (x.shape == y.shape and self.shape(x) == self.shape(y)):
            return self.value(x)
        return self.fitted(
            x, y, [(a, a) for a, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if m == n]
        )

    def merged(self, x: Operand, axis: int) -> tuple[Tensor, Dim]:
        """Merges all dimensions of an axis of x into one dimension with a name of its own."""
        return self.one(self.tensor(x), x, axis)

    def one(self, t: Tensor, x: Operand, axis: int) -> tuple[Tensor, Dim]:
        """The same of t, which has the dimensions of x along this axis."""
        return self.as_one(t, self.dims(x, axis))

    def along(self, t: Tensor, own: Sequence[Dim]) -> tuple[Tensor, Dim]:
        """t with all dimensions of an axis as one, under its own name where the axis has one."""
        return (having(t, own), own[0]) if len(own) == 1 else self.as_one(t, own)

    def as_one(self, t: Tensor, own: Sequence[Dim]) -> tuple[Tensor, Dim]:
        """Merges some dimensions, in this order, into one with a name of its own."""
        t = having(t, own)
        rest = [d for d in t.shape if d not in own]
        name = self.fresh("_".join([*(d.name for d in own), "axis"]))
        one = Dim(name, math.prod(d.size for d in own))
        if len(own) == 1:
            return mtf.rename(t, **{own[0].name: name}), one
        at = min((t.shape.index(d.name) for d in own), default=len(rest))
        order = [*rest[:at], *own, *rest[at:]]
        return mtf.reshape(mtf.transpose(t, order), [*rest[:at], one, *rest[at:]]), one

    def apart(self, t: Tensor, one: Dim, own: Sequence[Dim]) -> Tensor:
        """t with one dimension as several, or as none."""
        if len(own) == 1 and own[0].size == one.size:
            return mtf.rename(t, **{one.name: own[0].name})
        at = t.shape.index(one.name)
        return mtf.reshape(t, [*t.shape.dims[:at], *own, *t.shape.dims[at + 1 :]])

    def onto(self, t: Tensor, one: Dim, own: Sequence[Dim], names: dict[str, str]) -> Tensor:
        """Renames dimensions of t to names of their own and records in `names` their final names, because
        other dimensions of t may still have these."""
        parts = [Dim(self.fresh(f"{d.name}_made"), d.size) for d in own]
        names.update((p.name, d.name) for p, d in zip(parts, own, strict=True))
        return self.apart(t, one, parts)

    def _constant(self, v: CapturedArray) -> WrittenValue:
        if v.dtype == KEY:
            return of_words(np.moveaxis(v.value, -1, 0))
        array = np.asarray(v.value)
        if array.size == 0:
            raise Unimportable("the function uses an array without elements; remove the array")
        first = array.reshape(-1)[0]
        if array.size == 1 or (array == first).all():
            return ScalarArray(first.item() if array.dtype.kind in "biufc" else float(first), v.dtype)
        counted = self._counted(array, v)
        return self.stored(array, our_dtype(v.dtype), self.shape(v)) if counted is None else counted

    def _counted(self, array: Any, v: CapturedArray) -> Tensor | None:
        """0, 1, ... along one axis, which needs no storage."""
        if array.dtype.kind != "i":
            return None
        for axis, n in enumerate(array.shape):
            line = np.arange(n, dtype=array.dtype).reshape([n if i == axis else 1 for i in range(array.ndim)])
            if n > 1 and (array == line).all():
                return self.count(v, axis, our_dtype(v.dtype))
        return None

    def count(self, v: Operand, axis: int, dtype: str) -> Tensor:
        """0, 1, ... along an axis, whatever its factors."""
        total: Tensor | None = None
        stride = v.shape[axis]
        for d in self.dims(v, axis):
            stride //= d.size
            part = mtf.mtf_range(self.graph, d, dtype) * stride
            total = part if total is None else total + part
        return total if total is not None else mtf.constant(self.graph, 0, (), dtype)

    def stored(self, array: Any, dtype: str, dims: Sequence[Dim]) -> Tensor:
        """An array of the function as a variable of the graph, named by its content: builds of the model with
        other hyperparameters have other arrays, and share variables by name."""
        shape = Shape(dims)
        content = repr((dtype, shape.sizes)).encode() + np.asarray(array).tobytes()
        name = f"constants/{sha256(content).hexdigest()[:16]}"
        variable = Variable(name, shape, dtype, beginning(array, shape), False, captured=True)
        found = self.graph.variables.get(name) or self.graph.declare(variable)
        return mtf.rename(self.graph.read(found), **dict(zip(found.shape.names, shape.names, strict=True)))

    def function(self, block: EquationBlock) -> None:
        """Writes a whole function.

        Raises:
          UserError: that lists all that cannot be imported.
        """
        found = self.refusals.found
        try:
            self.block(block)
        except mtf.UserError:
            if not found:
                raise
        if found:
            raise refused(found) from found[0]

    def block(self, block: EquationBlock) -> None:
        """Writes the equations of a block with known values of its variables."""
        for equation in block.equations:
            self.equation(equation)

    def equation(self, e: Equation) -> None:
        """Writes one equation."""
        if e.outs and all(is_empty(y) for y in e.outs):
            self.values.update((id(y), ScalarArray(0, y.dtype)) for y in e.outs)
            return
        before = self.graph.count
        self.graph.place = e.where
        follows = self.refusals.follows(e)
        inside = nullcontext() if e.body is not None else self.graph.scope(scope_of(e))
        with inside, self.graph.in_call(e.call):
            try:
                self._written(e)
                self.refusals.leave(e)
            except (mtf.UserError, AssertionError) as error:
                if not follows or isinstance(error, Refusal):
                    self.refusals.add(e, error)
                if e.body is not None:  # half a loop is none
                    raise
                self._stand_in(e)
        for number in range(before, self.graph.count):
            self.sources.setdefault(number, e.where)

    def _written(self, e: Equation) -> None:
        handler = self.table.get(e.prim)
        if handler is None:
            why = e.params.get("why") or "this operation is not supported"
            refuse(e, why, _INSTEAD.get(e.prim, OTHERWISE))
        if e.prim != "scan" and any(isinstance(self.value(x), Keys) for x in e.ins) and e.may_give_keys:
            self.table[KEY](self, e)
            return
        handler(self, e)
        if len(e.outs) == 1 and isinstance(made := self.values.get(id(e.out)), Tensor):
            self.values[id(e.out)] = wrapped(e, made)

    def _stand_in(self, e: Equation) -> None:
        """Zeros for what cannot be imported, so that all else is looked at."""
        for y in e.outs:
            if y.dtype == KEY:
                self.values[id(y)] = Keys(0, why=f"{e.prim} in {e.where}")
            elif our_dtype(y.dtype) in DTYPES:
                zero = mtf.constant(self.graph, 0, (), our_dtype(y.dtype))
                self.values[id(y)] = mtf.broadcast(zero, self.shape(y))
            else:
                self.values[id(y)] = ScalarArray(0, y.dtype)


def having(t: Tensor, own: Sequence[Dim]) -> Tensor:
    """t with some dimensions, repeated along those that it lacks."""
    missing = [d for d in own if d.name not in t.shape.names]
    return mtf.broadcast(t, [*missing, *t.shape]) if missing else t


def scope_of(e: Equation) -> str:
    """The scope of an equation's operations: the names of its library and the user's line."""
    file, _, line = e.where.rpartition(":")
    place = f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}({line})" if file else ""
    return "/".join(filter(None, (e.scope, place))) or "model"

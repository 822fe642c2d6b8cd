"""Rows that a mask selects, `x[mask]`, as all rows beside their mask.

How many rows a mask selects depends on values. torch.export gives this number a symbol; here an axis of such
a size has all rows, operations that keep rows apart run on all of them, and sums leave out those that are not
selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import CapturedArray, Operand, has_fractions
from layoutopt.importers.torch.calls import dtype_of, torch_module
from layoutopt.importers.torch.capture import INSTEAD, ValuesNeededError
from layoutopt.importers.torch.elementwise import ELEMENTWISE, TABLE, Type, dims_of
from layoutopt.importers.torch.emitter import Equations

REAL = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Complex:
    """Two arrays of one shape."""

    real: Operand
    imag: Operand

    @property
    def shape(self) -> tuple[int, ...]:
        """That of both."""
        return self.real.shape


_PARTWISE = (
    *("view", "reshape", "flatten", "unflatten", "squeeze", "_unsafe_view", "unsqueeze", "expand"),
    *("expand_as", "transpose", "permute", "slice", "narrow", "select", "index_select", "index", "gather"),
    *("clone", "contiguous", "alias", "detach", "movedim"),
)
"""Operations that do the same with both arrays."""


def _mul(m: Equations, v: Type, a: Any, b: Any) -> Complex:
    def times(x: Any, y: Any) -> Operand:
        return m.binary("mul", x, y, v.dtype)

    if not isinstance(a, Complex):
        a, b = b, a
    if not isinstance(b, Complex):
        return Complex(times(a.real, b), times(a.imag, b))
    real = m.binary("sub", times(a.real, b.real), times(a.imag, b.imag), v.dtype)
    return Complex(real, m.binary("add", times(a.real, b.imag), times(a.imag, b.real), v.dtype))


_RULES: Mapping[str, Callable[..., Any]] = {
    "mul": _mul,
    "polar": lambda m, v, size, angle: Complex(
        *(m.binary("mul", size, m.unary(name, angle), v.dtype) for name in ("cos", "sin"))
    ),
    "complex": lambda m, v, re, im: Complex(re, im),
    "view_as_complex": lambda m, v, x: Complex(
        *(m.reshape(m.slice(x, len(x.shape) - 1, i, 1), x.shape[:-1]) for i in range(2))
    ),
    "view_as_real": lambda m, v, x: m.concatenate(
        [m.reshape(part, (*x.shape, 1)) for part in (x.real, x.imag)], len(x.shape)
    ),
    "real": lambda m, v, x: x.real,
    "imag": lambda m, v, x: x.imag,
    "conj": lambda m, v, x: Complex(x.real, m.unary("neg", x.imag)),
    **dict.fromkeys(("to", "_to_copy"), lambda m, v, x, *rest, **more: x),
}


def is_about(name: str, args: Sequence[Any]) -> bool:
    """True for an operation on complex numbers, or one that makes them."""
    return name in ("polar", "complex", "view_as_complex") or any(isinstance(x, Complex) for x in args)


def made_of_halves(m: Equations, name: str, v: Type, args: Sequence[Any]) -> Any:
    """The result of an operation; NotImplementedError if it has no rule."""
    if name in _RULES:
        return _RULES[name](m, v, *args)
    if name not in _PARTWISE:
        raise NotImplementedError("it is of complex numbers")
    sides = ([getattr(x, side) if isinstance(x, Complex) else x for x in args] for side in ("real", "imag"))
    return Complex(*(TABLE[name](m, v, *own) for own in sides))


_ALONG = {
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "sum", "mean", "amax"), 1),
    **dict.fromkeys(("cat", "concat", "gather", "unbind", "cumsum"), 1),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), 2),
}
"""Operations along axes -> the place of the argument `dim`, which must not be the axis of selected rows."""
_SHAPES = ("view", "reshape", "flatten", "_unsafe_view", "squeeze", "unsqueeze")
_ROWWISE = ELEMENTWISE | {
    *("linear", "embedding", "layer_norm", "rms_norm", "mm", "matmul", "addmm", "index", "one_hot"),
    *("select", "slice", "expand", "expand_as", "zeros", "zeros_like", "new_zeros"),
    *("ones", "ones_like", "new_ones", "full", "full_like"),
}
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
_PLACES = ("nonzero", "nonzero_numpy")


@dataclass(frozen=True)
class _Rows:
    """The mask of a symbol, as a line, and how many rows there are."""

    mask: Operand
    count: int


class Selections:
    """The symbols of a program that are numbers of selected rows."""

    def __init__(self, m: Equations) -> None:
        self.m = m
        self.rows: dict[str, _Rows] = {}

    def size(self, size: Any) -> int:
        """A size in which all rows count."""
        if isinstance(size, int):
            return size
        try:
            factor, name = self._symbol(size)
            return factor * self.rows[name].count
        except KeyError:
            return int(size)  # what is read later may have settled a symbol

    def _symbol(self, size: Any) -> tuple[int, str]:
        """A size as a multiple of one symbol; KeyError if it is none."""
        expr = size.node.expr
        symbols = [*expr.free_symbols]
        factor = expr / symbols[0] if len(symbols) == 1 else None
        if factor is None or not factor.is_Integer:
            raise KeyError(str(expr))
        return int(factor), str(symbols[0])

    def axes(self, value: Any) -> dict[int, tuple[int, str]]:
        """Axis of a tensor that has selected rows -> its factor and symbol."""
        found = dict[int, tuple[int, str]]()
        for a, size in enumerate(getattr(value, "shape", ())):
            if not isinstance(size, int):
                with suppress(KeyError):
                    factor, name = self._symbol(size)
                    found |= {a: (factor, name)} if name in self.rows else {}
        return found

    def concerns(self, n: Any) -> bool:
        """True if a node reads or makes selected rows."""
        values = [x.meta.get("val") for x in n.all_input_nodes]
        return bool(self.rows) and any(map(self.axes, (*values, *_tensors(n.meta.get("val")))))

    def count(self, size: Any) -> Operand | None:
        """A size made of numbers of selected rows and integers by sums and extremes; None if it is none."""
        return self._number(size.node.expr)

    def _number(self, of: Any) -> Operand | None:
        m, total = self.m, None
        for x, factor in of.as_coefficients_dict().items():
            rows, extreme = self.rows.get(str(x)), type(x).__name__.lower()
            part: Operand | None = m.constant(1, "int32") if x.is_Integer else None
            if rows is not None:
                part = m.reduced("reduce_sum", m.cast(rows.mask, "int32"), [0])
            elif extreme in ("max", "min"):
                each = [self._number(y) for y in x.args]
                known = [y for y in each if y is not None]
                part = reduce(lambda a, b: m.binary(extreme, a, b, "int32"), known) if known == each else None
            if part is None or not factor.is_Integer:
                return None
            part = m.binary("mul", part, int(factor), "int32") if factor != 1 else part
            total = m.binary("add", total, part, "int32") if total is not None else part
        return total

    def type_of(self, value: Any) -> Any:
        """The type of a tensor, or of each of several; None for what is none."""
        torch = torch_module()
        if isinstance(value, torch.Tensor):
            try:
                sizes = tuple(map(self.size, value.shape))
            except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode:
                where = self.m.where
                raise ValuesNeededError(
                    f"from_torch: {where}: a size depends on values of a batch; {INSTEAD}"
                ) from None
            kind = str(value.dtype).removeprefix("torch.")
            return Type(sizes, REAL.get(kind) or dtype_of(value.dtype))
        return [self.type_of(x) for x in value] if isinstance(value, list | tuple) else None

    def _selects(self, name: str, args: Sequence[Any]) -> bool:
        """Whether an operation selects by truth values."""
        if name in _PLACES or len(args) < 2:
            return name in _PLACES or name == "where"
        if name not in ("index", "masked_select"):
            return False
        listed = args[1] if isinstance(args[1], list | tuple) else [args[1]]
        return any(x is not None and x.dtype == "bool" for x in listed)

    def selected(self, n: Any, name: str, args: Sequence[Any]) -> tuple[Any, str]:
        """All rows of what an operation selects by truth values, or why not known; (None, ""): neither."""
        try:
            return self._all_rows(n, name, args) if self._selects(name, args) else None, ""
        except NotImplementedError as error:
            return None, str(error)

    def _all_rows(self, n: Any, name: str, args: Sequence[Any]) -> Any:
        m, x, value, own = self.m, args[0], n.meta["val"], n.args[0].meta["val"]
        if name in (*_PLACES, "where"):
            return self._places(value, name, self._within(x, (own, 0)))
        mask, of, begin = args[1], n.args[1], 0
        if name == "index":
            if len(given := [a for a, i in enumerate(mask) if i is not None]) > 1:
                raise NotImplementedError("it selects by truth values and by places")
            (begin,) = given
            mask, of = mask[begin], of[begin]
        else:
            shape = np.broadcast_shapes(x.shape, mask.shape)
            x, mask = m.expand(x, shape), m.expand(mask, shape)
        end, of = begin + len(mask.shape), of.meta["val"]
        off = -begin if name == "index" else len(mask.shape) - len(own.shape)
        mask = self._within(mask, (own, off), (of, len(mask.shape) - len(of.shape)))
        count = math.prod(mask.shape)
        self._know(value.shape[begin], mask, count)
        found = m.reshape(x, (*x.shape[:begin], count, *x.shape[end:]))
        return self._filled(found, {begin: self._symbol(value.shape[begin])})

    def _within(self, mask: Operand, *values: tuple[Any, int]) -> Operand:
        """A mask of rows that a mask selected as one of all rows; values, and how far their axes are off."""
        m, read = self.m, dict[int, tuple[int, str]]()
        for a, of in ((a + off, of) for value, off in values for a, of in self.axes(value).items()):
            if 0 <= a < len(mask.shape) and read.setdefault(a, of) != of:
                self._same(*(self.rows[name].mask for _, name in (read[a], of)))
        for axis in read.items():
            mask = m.binary("and", mask, self.hits(mask, dict([axis])), "bool")
        return mask

    def _places(self, value: Any, name: str, mask: Operand) -> Any:
        """The places where a mask is true: those of all elements."""
        m, count = self.m, math.prod(mask.shape)
        listed = value if isinstance(value, list | tuple) else [value]
        self._know(listed[0].shape[0], mask, count)
        wide = [m.reshape(m.counted(mask.shape, a, "int32"), (count,)) for a in range(len(mask.shape))]
        return m.concatenate([m.reshape(p, (count, 1)) for p in wide], 1) if name == "nonzero" else wide

    def _know(self, size: Any, mask: Operand, count: int) -> None:
        m = self.m
        if isinstance(size, int) or not size.node.expr.free_symbols:
            raise NotImplementedError("the code needs a certain number of the rows that a mask selects")
        factor, name = self._symbol(size)
        if factor != 1:
            raise NotImplementedError("it combines rows of different masks")
        old = self.rows.get(name)
        line = m.reshape(mask, (count,))
        self._same(line, *([old.mask] if old else []))
        self.rows.setdefault(name, _Rows(line, count))
        said = "rows that a mask selects are imported as all rows, of which sums leave out the others"
        m.notes[f"{m.where}: {said}; the user's program computes the selected ones alone"] = line

    def _same(self, *masks: Operand) -> None:
        if not all(_alike(self.m, masks[0], mask) for mask in masks):
            raise NotImplementedError("it combines rows of different masks")

    def hits(self, x: Operand, axes: Mapping[int, tuple[int, str]]) -> Operand:
        """Which elements of x are of selected rows."""
        ((axis, (factor, name)),) = axes.items()
        m, rows = self.m, self.rows[name]
        mask = rows.mask
        if factor > 1:  # the rest of a row was beside it
            mask = m.reshape(m.broadcast(mask, (rows.count, factor), [0]), (rows.count * factor,))
        return m.broadcast(mask, x.shape, [axis])

    def left_out(self, n: Any, name: str, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of an operation, in which rows that are not selected change no sum.

        Raises:
          NotImplementedError: it is not known to keep rows apart.
        """
        m, (first, *more) = self.m, args
        if name == "ctc_loss":  # the classes of all rows as one line, of which each row's are the first
            rows = more[1].shape[0]
            m.notes[f"{m.where}: imported as if the classes of each row came before its padding"] = None
            return (first, m.reshape(more[0], (rows, more[0].shape[0] // rows)), *more[1:])
        if name in ("held", "padded"):
            return args
        read = [self.axes(x.meta.get("val")) for x in n.all_input_nodes]
        made = [self.axes(v) for v in _tensors(n.meta.get("val"))]
        own, kept = {a for axes in (*read, *made) for a in axes}, all(made)
        masks = [self.rows[name].mask for axes in (*read, *made) for _, name in axes.values()]
        self._same(*masks)
        if any(len(axes) > 1 for axes in (*read, *made)):
            raise NotImplementedError("it combines each selected row with each")
        if name in _LOSSES and more[0].dtype.startswith("int"):
            ignored = more[3] if len(more) > 3 else -100
            hits = self.hits(more[0], self.axes(n.args[1].meta["val"]))
            return (first, m.select(hits, more[0], ignored, more[0].dtype), *more[1:])
        if name == "index_add" and not kept:
            hits = self.hits(more[2], self.axes(n.args[3].meta["val"]))
            return (first, *more[:2], m.select(hits, more[2], 0, more[2].dtype), *more[3:])
        if name == "index_put" and not kept:
            (ids, rows, *add), value = more, n.args[2].meta["val"]
            if not any(add):  # places of selected rows differ, so what is added there is the change
                old = TABLE["index"](m, Type(rows.shape, first.dtype), first, ids)
                rows = m.binary("sub", rows, old, first.dtype)
            return (first, ids, m.select(self.hits(rows, self.axes(value)), rows, 0, first.dtype), True)
        if name in ("sum", "mean") and not kept:
            return (m.select(self.hits(first, read[0]), first, 0, first.dtype), *more)
        apart = name in _ROWWISE or (name in _SHAPES and own <= {0})
        if name in _ALONG:
            value = next(x.meta["val"] for x, axes in zip(n.all_input_nodes, read, strict=True) if axes)
            dim = n.kwargs.get("dim", n.args[_ALONG[name]] if len(n.args) > _ALONG[name] else 0)
            apart = not own & {*dims_of(dim, len(value.shape))}
        if name == "index":
            places = {a for a, i in enumerate(args[1]) if i is not None}
            apart = places.isdisjoint(self.axes(n.args[0].meta["val"]))
        if name in ("layer_norm", "rms_norm"):
            apart = len(first.shape) - len(more[0]) not in own
        if not kept or not apart:
            raise NotImplementedError("it reads rows that a mask selects, whose number depends on values")
        return args

    def finished(self, n: Any, name: str, found: Any) -> Any:
        """A result in which rows that are not selected count in no mean, and reach no parameter."""
        axes = self.axes(n.meta["val"])
        if name == "mean" and not axes:
            ((_, symbol),) = self.axes(n.args[0].meta["val"]).values()
            rows = self.rows[symbol]
            count = self.m.reduced("reduce_sum", self.m.cast(rows.mask, found.dtype), [0])
            more = self.m.binary("div", rows.count, count, found.dtype)
            return self.m.binary("mul", found, more, found.dtype)
        others = [v for x in n.all_input_nodes for v in _tensors(x.meta.get("val")) if not self.axes(v)]
        return self._filled(found, axes) if axes and any(v.is_floating_point() for v in others) else found

    def _filled(self, x: Operand, axes: Mapping[int, tuple[int, str]]) -> Operand:
        """x with 1 in rows that are not selected: 0 times their slope may be NaN, this one is exactly 0."""
        return self.m.select(self.hits(x, axes), x, 1, x.dtype) if has_fractions(x) else x


def _tensors(value: Any) -> list[Any]:
    listed = value if isinstance(value, list | tuple) else [value]
    return [x for x in listed if hasattr(x, "shape")]


def _alike(m: Equations, a: Operand, b: Operand) -> bool:
    """Whether the same equations make two values of the same arguments."""
    if a is b:
        return True
    if isinstance(a, CapturedArray) and isinstance(b, CapturedArray):
        return a.shape == b.shape and np.array_equal(a.value, b.value)
    one, other = m.made.get(id(a)), m.made.get(id(b))
    if one is None or other is None or one.prim != other.prim or repr(one.params) != repr(other.params):
        return False
    known = one.body is None and "random" not in one.prim and len(one.ins) == len(other.ins)
    return known and all(_alike(m, x, y) for x, y in zip(one.ins, other.ins, strict=True))

"""ATen's operations that move elements, or make arrays of none; and writes in place to views of elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import CapturedArray, Operand, Var
from layoutopt.importers.torch.elementwise import TABLE, Type, formulas, rule
from layoutopt.importers.torch.emitter import Equations


def _scaled(m: Equations, x: Operand, factor: Any, plus: Any) -> Operand:
    return m.binary("add", m.binary("mul", x, factor, x.dtype), plus, x.dtype)


formulas(
    {
        "view reshape flatten unflatten squeeze _unsafe_view view_as reshape_as": lambda m, v, x, *to: (
            m.reshape(x, v.shape)
        ),
        "unsqueeze": lambda m, v, x, dim: m.broadcast(
            x, v.shape, [a for a in range(len(v.shape)) if a != dim % len(v.shape)]
        ),
        "zeros new_zeros zeros_like empty new_empty empty_like empty_permuted": lambda m, v, *given, **more: (
            m.full(0, v.shape, v.dtype)
        ),
        "rand rand_like": lambda m, v, *given, **more: m.drawn("random_uniform", v.shape, v.dtype),
        "randn randn_like": lambda m, v, *given, **more: m.cast(m.drawn("random_normal", v.shape), v.dtype),
        "uniform": lambda m, v, x, low=0.0, high=1.0: _scaled(m, TABLE["rand"](m, v), high - low, low),
        "normal": lambda m, v, x, mean=0.0, std=1.0: _scaled(m, TABLE["randn"](m, v), std, mean),
        "exponential": lambda m, v, x, rate=1.0: m.binary(
            "mul",
            m.unary("log", m.binary("sub", 1, m.drawn("random_uniform", v.shape, v.dtype), v.dtype)),
            -1 / rate,
            v.dtype,
        ),
        "bernoulli": lambda m, v, x, p=None: m.cast(
            m.binary("lt", m.drawn("random_uniform", v.shape), x if p is None else p, "float32", "bool"),
            v.dtype,
        ),
        "eye": lambda m, v, *given, **more: m.cast(
            m.binary("eq", *(m.counted(v.shape, a, "int32") for a in range(2)), "int32", "bool"), v.dtype
        ),
        "expand expand_as broadcast_to": lambda m, v, x, *to, **more: m.expand(x, v.shape),
        "permute": lambda m, v, x, order: m.transpose(x, order),
        "unbind": lambda m, v, x, dim=0: [_select(m, t, x, dim, i) for i, t in enumerate(v)],
        "flip": lambda m, v, x, dims: m.unary("rev", x, dimensions=tuple(d % len(x.shape) for d in dims)),
        "ones new_ones ones_like": lambda m, v, *given, **more: m.full(1, v.shape, v.dtype),
        "copy": lambda m, v, x, y, *more: m.expand(m.cast(y, v.dtype), v.shape),
        "zero": lambda m, v, x: m.full(0, v.shape, v.dtype),
        "item": lambda m, v, x: m.reshape(m.unary("stop_gradient", x), ()),
        "numel": lambda m, v, x: math.prod(x.shape),
        "cat concat concatenate": lambda m, v, xs, dim=0: m.concatenate(
            [m.cast(x, v.dtype) for x in xs], dim % len(v.shape)
        ),
        "t numpy_T mT": lambda m, v, x: swapped(m, v, x, -1, -2) if len(x.shape) > 1 else x,
        "fill": lambda m, v, x, value: m.full(
            m.reshape(value, ()) if isinstance(value, Var | CapturedArray) else value, v.shape, v.dtype
        ),
    }
)


@rule("transpose", "swapaxes", "transpose_copy")
def swapped(m: Equations, v: Any, x: Operand, a: int, b: int) -> Operand:
    """x with two axes in each other's place."""
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return m.transpose(x, order)


@rule("slice")
def _slice(
    m: Equations, v: Type, x: Operand, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Operand:
    dim %= len(x.shape)
    start = 0 if start is None else start
    begin = min(max(start + x.shape[dim], 0) if start < 0 else start, x.shape[dim])
    if 0 in v.shape:
        return m.constant(np.zeros(v.shape), v.dtype)
    return m.slice(x, dim, begin, v.shape[dim], step)


@rule("select")
def _select(m: Equations, v: Type, x: Operand, dim: int, index: int) -> Operand:
    dim %= len(x.shape)
    one = m.slice(x, dim, index % x.shape[dim], 1)
    return m.emit("squeeze", [one], v.shape, x.dtype, dimensions=(dim,))


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def _split(m: Equations, v: Sequence[Type], x: Operand, sizes: Any, dim: int = 0) -> list[Operand]:
    dim %= len(x.shape)
    begins = accumulate((t.shape[dim] for t in v), initial=0)
    return [m.slice(x, dim, at, t.shape[dim]) for at, t in zip(begins, v, strict=False)]


@rule("constant_pad_nd")
def _pad(m: Equations, v: Type, x: Operand, widths: Sequence[int], value: Any = 0) -> Operand:
    config = [(0, 0, 0)] * len(x.shape)
    for i in range(len(widths) // 2):
        config[-1 - i] = (int(widths[2 * i]), int(widths[2 * i + 1]), 0)
    return m.emit("pad", [x, m.constant(value, x.dtype)], v.shape, x.dtype, padding_config=tuple(config))


@rule("unfold")
def _unfold(m: Equations, v: Type, x: Operand, dim: int, size: int, step: int) -> Operand:
    """Windows along an axis; the places in them are the last axis."""
    dim %= len(x.shape)
    parts = [m.slice(x, dim, at, v.shape[dim], step) for at in range(size)]
    return m.concatenate([m.reshape(y, (*y.shape, 1)) for y in parts], len(x.shape))


@rule("arange")
def _arange(m: Equations, v: Type, *given: Any, **more: Any) -> Operand:
    numbers = [x for x in given if isinstance(x, int | float)]
    begin, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    if (begin, step) == (0, 1) and v.dtype.startswith("int") and v.shape[0] > 1:
        return m.counted(v.shape, 0, v.dtype)
    return m.constant(begin + step * np.arange(v.shape[0]), v.dtype)


@rule("full", "new_full", "full_like", "scalar_tensor")
def _full(m: Equations, v: Type, *given: Any, **more: Any) -> Operand:
    value = next(x for x in given[::-1] if isinstance(x, int | float | bool | Var | CapturedArray))
    return m.full(value, v.shape, v.dtype)


@rule("randint", "randint_like")
def _randint(m: Equations, v: Type, *given: Any, **more: Any) -> Operand:
    low, high = ([0] + [x for x in given if isinstance(x, int)])[-2:]
    if high - low > 2**24:
        raise NotImplementedError(f"it draws from {high - low} numbers, more than 2**24")
    places = m.binary("mul", m.drawn("random_uniform", v.shape), high - low, "float32")
    return m.binary("add", m.cast(m.unary("floor", places), v.dtype), low, v.dtype)


Inverse = Callable[[Equations, Operand, Operand, Sequence[Any]], Operand]


def _sliced_back(m: Equations, whole: Operand, value: Operand, args: Sequence[Any]) -> Operand:
    default: list[Any] = [0, None, None, 1]
    dim, start, _, step = [*args, *default[len(args) :]]
    dim %= len(whole.shape)
    start = 0 if start is None else max(start + whole.shape[dim], 0) if start < 0 else start
    if 0 in value.shape:
        return whole
    if step != 1:
        places = np.arange(whole.shape[dim]) - start
        hit = (places >= 0) & (places % step == 0) & (places < value.shape[dim] * step)
        apart = [(0, 0, 0)] * len(whole.shape)
        apart[dim] = (start, whole.shape[dim] - start - (value.shape[dim] - 1) * step - 1, step - 1)
        ins = [value, m.constant(0, value.dtype)]
        wide = m.emit("pad", ins, whole.shape, value.dtype, padding_config=tuple(apart))
        hits = m.broadcast(m.constant(hit, "bool"), whole.shape, [dim])
        return m.select(hits, wide, whole, whole.dtype)
    end = start + value.shape[dim]
    rest = whole.shape[dim] - end
    parts = [m.slice(whole, dim, 0, start)] if start else []
    parts += [value, *([m.slice(whole, dim, end, rest)] if rest else [])]
    return m.concatenate(parts, dim)


def _selected_back(m: Equations, whole: Operand, value: Operand, args: Sequence[Any]) -> Operand:
    dim, index = args[0] % len(whole.shape), args[1] % whole.shape[args[0]]
    wide = [1 if a == dim else n for a, n in enumerate(whole.shape)]
    row = m.broadcast(value, wide, [a for a in range(len(wide)) if a != dim])
    return _sliced_back(m, whole, row, (dim, index, index + 1))


INVERSES: Mapping[str, Inverse] = {
    **dict.fromkeys(
        ("view", "reshape", "flatten", "squeeze", "unsqueeze", "_unsafe_view"),
        lambda m, of, value, args: m.reshape(value, of.shape),
    ),
    "transpose": lambda m, whole, value, args: swapped(m, whole, value, *args),
    "permute": lambda m, whole, value, args: m.transpose(
        value, np.argsort([a % len(value.shape) for a in args[0]]).tolist()
    ),
    "slice": _sliced_back,
    "select": _selected_back,
    **dict.fromkeys(("alias", "detach", "contiguous"), lambda m, of, value, args: m.cast(value, of.dtype)),
}
"""Views that may be written to."""

"""Writes in place to a view, as writes to what it is a view of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import Operand
from layoutopt.importers.torch.emitter import Equations
from layoutopt.importers.torch.shapes import swapped

Inverse = Callable[[Equations, Operand, Operand, Sequence[Any]], Operand]


def _permuted_back(m: Equations, whole: Operand, value: Operand, args: Sequence[Any]) -> Operand:
    order = [a % len(value.shape) for a in args[0]]
    return m.transpose(value, [order.index(a) for a in range(len(order))])


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
    "permute": _permuted_back,
    "slice": _sliced_back,
    "select": _selected_back,
    **dict.fromkeys(("alias", "detach", "contiguous"), lambda m, of, value, args: m.cast(value, of.dtype)),
}
"""Views that may be written to."""

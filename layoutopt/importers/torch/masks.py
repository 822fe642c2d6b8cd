"""Keys that an attention hides, where its mask is made of positions alone.

transformers makes masks of comparisons of positions, for every example and in their full size, when it is
traced. The same operations are followed here beside the reader, on arrays without their repeated axes, so
that a causal mask is one however long the text is. What is not understood stays an array of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST = 1 << 22
"""Elements up to which arrays are computed."""
LONGEST = 1 << 20
"""Positions up to which they are followed: longer lines number the rows that a mixture sorts."""
_HIDES = -1e4
"""What is added to logits from here on down hides a key."""


@dataclass(frozen=True)
class KnownArray:
    """An array whose values are known: of one element along every axis that it is repeated along."""

    array: Any
    shape: tuple[int, ...]

    def whole(self) -> Any:
        return np.broadcast_to(self.array, self.shape)


@dataclass(frozen=True)
class MaskCondition:
    """Position times `factors`, summed over the axes, plus `plus`, is at least 0."""

    factors: tuple[int, ...]
    plus: int


@dataclass(frozen=True)
class Holds:
    """A truth value for every element: whether all conditions hold.

    Attributes:
      hides: it is a number instead: 0 where they hold, and else one that hides a key.
    """

    conditions: tuple[MaskCondition, ...]
    shape: tuple[int, ...]
    hides: bool = False


Shadow = KnownArray | Holds


@dataclass(frozen=True)
class HiddenKeys:
    """The keys that a query does not see: later ones, and those `window` or more positions away; 0: none."""

    causal: bool = False
    window: int = 0


def hidden(mask: Shadow, queries: int, keys: int) -> HiddenKeys | None:
    """The keys that a mask hides; None if they are not those of a causal mask or a window."""
    found = _of_conditions(mask, queries, keys) if isinstance(mask, Holds) else _of_array(mask)
    if found is None or (found != HiddenKeys() and queries != keys):
        return None
    return HiddenKeys(found.causal, 0 if found.window >= keys else found.window)


def _of_conditions(mask: Holds, queries: int, keys: int) -> HiddenKeys | None:
    causal, back, ahead = False, 0, 0
    for c in mask.conditions:
        row, column = c.factors[-2:]
        if any(c.factors[:-2]):
            return None
        least = c.plus + min(row * (queries - 1), 0) + min(column * (keys - 1), 0)
        if least >= 0:
            continue
        if (row, column) == (1, -1) and c.plus == 0:
            causal = True
        elif (row, column) == (-1, 1) and c.plus > 0:
            back = min(back or c.plus + 1, c.plus + 1)
        elif (row, column) == (1, -1) and c.plus > 0:
            ahead = c.plus + 1
        else:
            return None
    if back and not causal and ahead != back:
        return None
    return HiddenKeys(causal, back) if back or not ahead or causal else None


def _of_array(mask: KnownArray) -> HiddenKeys | None:
    array = mask.array
    if math.prod(array.shape[:-2]) != 1:
        return None
    seen = array if array.dtype == bool else array > _HIDES
    if array.dtype != bool and (array[seen] != 0).any():
        return None
    if seen.all():
        return HiddenKeys()
    seen = seen.reshape(seen.shape[-2:])
    if seen.shape[0] != seen.shape[1]:
        return None
    distance = np.subtract.outer(np.arange(seen.shape[0]), np.arange(seen.shape[1]))
    window = int(seen[-1].sum())
    for causal in (True, False):
        for size in (0, window):
            ahead = distance >= 0 if causal else (distance > -size) | (size == 0)
            if (seen == (ahead & ((distance < size) | (size == 0)))).all():
                return HiddenKeys(causal, size)
    return None


Follow = Callable[..., "Shadow | None"]


def followed(
    name: str, shape: tuple[int, ...], dtype: str, args: Sequence[Any], more: Mapping[str, Any]
) -> Shadow | None:
    """The shadow of an operation's result, of those of its operands; None if it is not known."""
    rule = _RULES.get(name)
    if rule is None:
        return None
    try:
        found = rule(shape, *args, **more)
    except (TypeError, ValueError, IndexError, AttributeError):
        return None  # a form of the operation that masks do not use
    if isinstance(found, Holds):
        return found if found.hides == (dtype != "bool") else None
    if found is not None and dtype == "bool" and found.array.dtype != bool:
        return KnownArray(found.array != 0, found.shape)
    return found


def _known(array: Any, shape: Sequence[int]) -> KnownArray | None:
    """An array of a result, if it is small enough."""
    array = np.asarray(array)
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    if array.size > LARGEST:
        return None
    for axis in (a for a, n in enumerate(array.shape) if n > 1):
        first = array.take([0], axis)
        array = first if (array == first).all() else array
    return KnownArray(array, tuple(shape))


def _value(x: Any, rank: int) -> Any:
    """The array of an operand, of a rank."""
    array = x.array if isinstance(x, KnownArray) else np.asarray(x)
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


def _arange(shape: tuple[int, ...], *args: Any, **more: Any) -> Shadow | None:
    numbers = [x for x in args if isinstance(x, int | float)]
    begin, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    if shape[0] > LONGEST:
        return None
    return KnownArray(begin + step * np.arange(shape[0]), shape)


def _filled(value: Any) -> Follow:
    def rule(shape: tuple[int, ...], *args: Any, **more: Any) -> Shadow | None:
        numbers = [x for x in args if isinstance(x, int | float | bool)]
        return KnownArray(np.full((1,) * len(shape), numbers[-1] if value is None else value), shape)

    return rule


def _elementwise(function: Callable[..., Any]) -> Follow:
    def rule(shape: tuple[int, ...], *args: Any, **more: Any) -> Shadow | None:
        if any(isinstance(x, Holds) for x in args) or any(v != 1 for v in more.values() if v is not None):
            return None
        arrays = [_value(x, len(shape)) for x in args]
        if math.prod(np.broadcast_shapes(*(a.shape for a in arrays))) > LARGEST:
            return None
        return _known(function(*arrays), shape)

    return rule


def _progression(x: Any, rank: int) -> tuple[tuple[int, ...], int] | None:
    """An array as the sum of positions times factors, plus a number."""
    array = _value(x, rank)
    moving = [a for a, n in enumerate(array.shape) if n > 1]
    if len(moving) > 1 or array.dtype.kind not in "iub":
        return None
    line = array.reshape(-1).astype(np.int64)
    step = int(line[1] - line[0]) if len(line) > 1 else 0
    if (np.diff(line) != step).any():
        return None
    return tuple(step if a in moving else 0 for a in range(rank)), int(line[0])


def _compared(function: Callable[..., Any], sign: int, less: int) -> Follow:
    """A comparison that holds where sign · (a - b) is at least `less`."""

    def rule(shape: tuple[int, ...], a: Any, b: Any) -> Shadow | None:
        if isinstance(a, Holds) or isinstance(b, Holds):
            return None
        arrays = [_value(x, len(shape)) for x in (a, b)]
        out = math.prod(np.broadcast_shapes(*(x.shape for x in arrays)))
        if sign and out > max(x.size for x in arrays):
            x, y = (_progression(v, len(shape)) for v in (a, b))
            if x is not None and y is not None:
                factors = tuple(sign * (m - n) for m, n in zip(x[0], y[0], strict=True))
                return Holds((MaskCondition(factors, sign * (x[1] - y[1]) - less),), shape)
        return _known(function(*arrays), shape) if out <= LARGEST else None

    return rule


def _and(shape: tuple[int, ...], a: Any, b: Any) -> Shadow | None:
    own = [_ranked(x, shape) for x in (a, b) if not (isinstance(x, KnownArray) and x.array.all())]
    if all(isinstance(x, Holds) for x in own) and own:
        return Holds(tuple(c for x in own for c in x.conditions), shape)
    return _elementwise(np.logical_and)(shape, a, b)


def _or(shape: tuple[int, ...], a: Any, b: Any) -> Shadow | None:
    own = [x for x in (a, b) if not (isinstance(x, KnownArray) and not x.array.any())]
    if len(own) == 1 and isinstance(own[0], Holds):
        return _ranked(own[0], shape)
    return _elementwise(np.logical_or)(shape, a, b)


def _not(shape: tuple[int, ...], x: Any) -> Shadow | None:
    if not isinstance(x, Holds):
        return _elementwise(np.logical_not)(shape, x)
    if len(x.conditions) != 1:
        return None
    (c,) = x.conditions
    return Holds((MaskCondition(tuple(-f for f in c.factors), -c.plus - 1),), shape)


def _ranked(x: Any, shape: tuple[int, ...]) -> Any:
    """An operand on the axes of a larger shape."""
    if not isinstance(x, Holds):
        return _known(x.array, shape) if isinstance(x, KnownArray) else x
    lead = (0,) * (len(shape) - len(x.shape))
    return Holds(tuple(MaskCondition((*lead, *c.factors), c.plus) for c in x.conditions), shape, x.hides)


def _where(shape: tuple[int, ...], where: Any, yes: Any, no: Any) -> Shadow | None:
    if not isinstance(where, Holds):
        return _elementwise(np.where)(shape, where, yes, no)
    first, second = (np.unique(_value(x, len(shape))) for x in (yes, no))
    if len(first) == len(second) == 1 and first[0] == 0 and second[0] < _HIDES:
        return Holds(_ranked(where, shape).conditions, shape, hides=True)
    return None


def _masked(shape: tuple[int, ...], x: Any, where: Any, value: Any) -> Shadow | None:
    if not isinstance(where, Holds):
        return _where(shape, where, value, x)
    other = _not(where.shape, where)
    return None if other is None else _where(shape, other, x, value)


def _triangle(sign: int) -> Follow:
    """tril, or triu."""

    def rule(shape: tuple[int, ...], x: Any, diagonal: int = 0) -> Shadow | None:
        own = np.unique(x.array)
        if len(own) != 1 or not (own[0] == 1 or own[0] < _HIDES):
            return None
        lead = (0,) * (len(shape) - 2)
        inside = MaskCondition((*lead, sign, -sign), sign * diagonal)
        if own[0] == 1:
            return Holds((inside,), shape)
        other = _not(shape, Holds((inside,), shape))
        assert isinstance(other, Holds)
        return Holds(other.conditions, shape, hides=True)

    return rule


def _reshaped(shape: tuple[int, ...], x: Any, *args: Any, **more: Any) -> Shadow | None:
    """A view that only adds or removes axes of one element; of whole arrays, any."""
    old, new = ([a for a, n in enumerate(s) if n != 1] for s in (x.shape, shape))
    if [x.shape[a] for a in old] == [shape[a] for a in new]:
        at = dict(zip(new, old, strict=True))
        if isinstance(x, KnownArray):
            sizes = [x.array.shape[at[a]] if a in at else 1 for a in range(len(shape))]
            return KnownArray(x.array.reshape(sizes), shape)

        def moved(c: MaskCondition) -> MaskCondition:
            return MaskCondition(tuple(c.factors[at[a]] if a in at else 0 for a in range(len(shape))), c.plus)

        return Holds(tuple(map(moved, x.conditions)), shape, x.hides)
    if isinstance(x, KnownArray) and math.prod(shape) <= LARGEST:
        return KnownArray(x.whole().reshape(shape), shape)
    return None


def _transposed(shape: tuple[int, ...], x: Any, *order: Any) -> Shadow | None:
    axes = list(range(len(shape)))
    if len(order) == 1:
        axes = [a % len(shape) for a in order[0]]
    else:
        a, b = (n % len(shape) for n in order)
        axes[a], axes[b] = b, a
    if isinstance(x, KnownArray):
        return KnownArray(x.array.transpose(axes), shape)
    moved = (MaskCondition(tuple(c.factors[a] for a in axes), c.plus) for c in x.conditions)
    return Holds(tuple(moved), shape, x.hides)


def _sliced(shape: tuple[int, ...], x: Any, dim: int = 0, *bounds: Any) -> Shadow | None:
    dim %= len(shape)
    start, end, step = (*bounds, None, None, 1)[:3] if len(bounds) < 3 else bounds
    if isinstance(x, KnownArray):
        cut = [slice(None)] * len(shape)
        cut[dim] = slice(start, end, step)
        return KnownArray(x.array if x.array.shape[dim] == 1 else x.array[tuple(cut)], shape)
    return Holds(x.conditions, shape, x.hides) if not start and step == 1 else None


def _indexed(shape: tuple[int, ...], x: KnownArray, ids: Sequence[KnownArray | None]) -> Shadow | None:
    if x.array.size == 1:
        return KnownArray(x.array.reshape((1,) * len(shape)), shape)
    if any(i is None for i in ids) or any(n == 1 < m for n, m in zip(x.array.shape, x.shape, strict=True)):
        pairs = zip(x.array.shape, ids, strict=True)
        small = tuple(0 if n == 1 else i.array for n, i in pairs if i is not None)
        return _known(x.array[small], shape) if len(small) == x.array.ndim else None
    return _known(x.array[tuple(i.array for i in ids if i is not None)], shape)


def _along(function: Callable[..., Any]) -> Follow:
    def rule(shape: tuple[int, ...], x: KnownArray, dim: int = -1, **more: Any) -> Shadow | None:
        own = np.repeat(x.array, x.shape[dim] if x.array.shape[dim] == 1 else 1, dim)
        return _known(function(own, axis=dim), shape)

    return rule


def _diff(
    shape: tuple[int, ...], x: KnownArray, n: int = 1, dim: int = -1, prepend: Any = None, *more: Any
) -> Shadow | None:
    before = {} if prepend is None else {"prepend": prepend.whole()}
    return _known(np.diff(x.whole(), n, dim, **before), shape)


_RULES: Mapping[str, Follow] = {
    "arange": _arange,
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _filled(0)),
    **dict.fromkeys(("full", "new_full", "full_like", "scalar_tensor"), _filled(None)),
    "add": _elementwise(np.add),
    "sub": _elementwise(np.subtract),
    "mul": _elementwise(np.multiply),
    "neg": _elementwise(np.negative),
    "floor_divide": _elementwise(np.floor_divide),
    "le": _compared(np.less_equal, -1, 0),
    "lt": _compared(np.less, -1, 1),
    "ge": _compared(np.greater_equal, 1, 0),
    "gt": _compared(np.greater, 1, 1),
    "eq": _compared(np.equal, 0, 0),
    "ne": _compared(np.not_equal, 0, 0),
    **dict.fromkeys(("bitwise_and", "logical_and", "__and__"), _and),
    **dict.fromkeys(("bitwise_or", "logical_or", "__or__"), _or),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    "where": _where,
    "masked_fill": _masked,
    "tril": _triangle(1),
    "triu": _triangle(-1),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "_unsafe_view", "flatten"), _reshaped),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), lambda shape, x, *_, **__: _ranked(x, shape)),
    "repeat": lambda shape, x, *_: _ranked(x, shape) if np.broadcast_shapes(x.shape, shape) else None,
    **dict.fromkeys(("transpose", "permute"), _transposed),
    "slice": _sliced,
    "index": _indexed,
    "cumsum": _along(np.cumsum),
    "diff": _diff,
    **dict.fromkeys(
        ("to", "clone", "contiguous", "alias", "detach", "lift_fresh_copy", "_to_copy"),
        lambda shape, x, *_, **__: x if isinstance(x, KnownArray | Holds) and x.shape == shape else None,
    ),
}

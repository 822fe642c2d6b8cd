"""Random keys as JAX derives them: draws that are equal in JAX are equal here.

In JAX `split(key, n)[i]` and `fold_in(key, i)` are one function of the key and i (Threefry by default,
partitionable). A key is therefore its start and the numbers folded in since. The graph folds the same numbers
(`FoldIn`), which are known when the model is built or are counted by its loops. An array of keys has arrays
of numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import KEY, Operand
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.random import FoldIn, folded
from mesh_tf_core.tracing.graph import Graph

KeyPart = Any
"""A number that is folded in: int, a scalar of the graph, or an array of either for an array of keys."""

SEEDED = zlib.crc32(b"seed")
"""The first words of keys with known words."""
_FEW = 64
"""As many keys of one iteration of a loop are followed one by one."""


@dataclass(frozen=True, eq=False)
class Keys:
    """Random keys.

    Attributes:
      start: the first key.
      path: the numbers that were folded in, in order; arrays have the shape of the array of keys.
      stepped: whether they are others in every step.
      why: the operation that made them, if it cannot be followed.
    """

    start: KeyPart
    path: tuple[KeyPart, ...] = ()
    stepped: bool = False
    why: str = ""

    def each(self, change: Callable[[Any], Any]) -> Keys:
        """With the arrays changed."""
        start, *path = (plain(change(x)) if isinstance(x, np.ndarray) else x for x in self.parts)
        return replace(self, start=start, path=tuple(path))

    def then(self, part: KeyPart) -> Keys:
        """With one more number folded in."""
        return replace(self, path=(*self.path, part))

    @property
    def parts(self) -> tuple[KeyPart, ...]:
        return (self.start, *self.path)

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """Equal where the keys are known to be."""
        return (self.stepped, *(map(_identity, self.parts)))

    @cached_property
    def rows(self) -> set[tuple[Any, ...]]:
        """The identities of all keys of the array."""
        count = max((x.size for x in self.parts if isinstance(x, np.ndarray)), default=1)
        columns = [x.ravel() if isinstance(x, np.ndarray) else [x] * count for x in self.parts]
        return {(self.stepped, *map(_identity, row)) for row in zip(*columns, strict=True)}

    def meets(self, other: Keys) -> bool:
        """True if a key of one array is known to be one of the other's."""
        if len(self.path) != len(other.path):
            return False
        pairs = zip(self.parts, other.parts, strict=True)
        single = (pair for pair in pairs if not any(isinstance(x, np.ndarray) for x in pair))
        alike = all(_identity(x) == _identity(y) for x, y in single)
        return alike and not self.rows.isdisjoint(other.rows)


def root(name: str, shape: Sequence[int]) -> Keys:
    """Keys that are arguments, others in every step."""
    keys = Keys(zlib.crc32(name.encode()), stepped=True)
    return keys.then(numbered(shape)) if shape else keys


def of_words(words: Sequence[Any]) -> Keys:
    """Keys of words that are known, the first of all and so on."""
    return Keys(SEEDED, tuple(plain(np.asarray(a).astype(np.int64)) for a in words))


def shape_of(v: Operand) -> tuple[int, ...]:
    """The shape of an array of keys, without the words of each."""
    return v.shape if v.dtype == KEY else v.shape[:-1]


def numbered(shape: Sequence[int]) -> KeyPart:
    """0, 1, ... of an array of keys."""
    return plain(np.arange(int(np.prod(shape))).reshape(shape))


def _identity(x: KeyPart) -> Any:
    if isinstance(x, np.ndarray):
        return x.shape, tuple(map(_identity, x.ravel()))
    return ("tensor", x.id) if isinstance(x, Tensor) else int(x)


def plain(x: np.ndarray) -> KeyPart:
    """Replaces an array of equal elements by that element."""
    first = x.ravel()[0]
    if all(y is first for y in x.ravel()) if x.dtype == object else bool((x == first).all()):
        return first if isinstance(first, Tensor) else int(first)
    return x


def lost(why: str) -> Keys:
    """Keys that cannot be followed."""
    return Keys(0, why=why)


def premixed(keys: Keys) -> Keys:
    """Folds the known numbers as long as they come first."""
    start, path = keys.start, list(keys.path)
    while path and not counted(start) and not counted(path[0]):
        start = np.frompyfunc(folded, 2, 1)(start, path.pop(0))
        start = plain(start.astype(np.int64)) if isinstance(start, np.ndarray) else int(start)
    return replace(keys, start=start, path=tuple(path))


def counted(x: KeyPart) -> bool:
    """True if a part is of the graph."""
    return isinstance(x, Tensor) or (isinstance(x, np.ndarray) and x.dtype == object)


def at_place(keys: Keys, place: Tensor, table: Callable[[Any], Tensor] | None = None) -> Keys:
    """The keys at one place of the first axis.

    Args:
      table: makes whole numbers, one for each place, that at the place; None: they must be in a row.
    """
    found = [_at_place(x, place, table) if isinstance(x, np.ndarray) else [x] for x in keys.parts]
    if not all(found) or len(found[0]) > 1:
        return lost("keys that each iteration of a loop makes in a different way")
    start, *path = (part for parts in found for part in parts)
    return replace(keys, start=start, path=tuple(path))


def _at_place(x: np.ndarray, place: Tensor, table: Callable[[Any], Tensor] | None) -> list[KeyPart]:
    """What is folded in for a part at one place of its first axis; nothing if that cannot be said."""
    rows = x.reshape(len(x), -1)
    if all(_identity(row) == _identity(rows[0]) for row in rows):
        return [plain(x[0])]
    if x.dtype == object:
        return []
    columns = rows.T
    if (columns == columns[0]).all():
        columns = columns[:1]
    if len(columns) > _FEW:
        # Keys of many examples draw together: one number for the iteration, and theirs.
        stride = _stride(rows)
        return [] if stride is None else [place * stride, x[0]]
    made = np.empty(len(columns), object)
    for j, column in enumerate(columns):
        stride = _stride(column)
        if stride is not None:
            t = place if stride == 1 else place * stride
            made[j] = t if column[0] == 0 else t + int(column[0])
        elif table is None:
            return []
        else:
            made[j] = table(column)
    return [made[0]] if len(made) == 1 else [made.reshape(x.shape[1:])]


def _stride(rows: np.ndarray) -> int | None:
    """What each row adds to the one before, if that is one number and the graph can count so: in int32. Any
    two numbers are in a row, also hashes of 32 bits."""
    strides = np.diff(rows, axis=0)
    counts = (strides == strides.flat[0]).all() and rows.min() >= 0 and rows.max() < 2**31
    return int(strides.flat[0]) if counts else None


def state(graph: Graph, keys: Keys) -> KeyPart:
    """The value that further numbers are folded into: int, or a scalar of the graph."""
    keys = premixed(keys)
    return _fold(graph, keys.start, keys.path) if keys.path else keys.start


def key_of(graph: Graph, keys: Keys) -> Tensor:
    """The random key in the graph, one for all of an array."""
    keys = premixed(keys.each(lambda a: np.array(zlib.crc32(repr(_identity(a)).encode()))))

    def make() -> Tensor:
        last = graph.step() if keys.stepped else mtf.constant(graph, 0, (), "int32")
        return _fold(graph, keys.start, (*keys.path, last))

    found: Tensor = graph.once(("key", keys.identity), make)
    return found


def _fold(graph: Graph, start: KeyPart, path: Sequence[KeyPart]) -> Tensor:
    given = [x.cast("int32") for x in (start, *path) if isinstance(x, Tensor)]
    numbers = tuple(None if isinstance(x, Tensor) else int(x) for x in path)
    made: Tensor = graph.apply(FoldIn(None if isinstance(start, Tensor) else int(start), numbers), *given)
    return made


@dataclass(frozen=True)
class Draw:
    """A draw of random numbers: its keys, and how.

    Attributes:
      how: distribution and sizes; equal keys draw equal numbers where it is equal.
      where: file and line of the user's code.
    """

    keys: Keys
    how: tuple[Any, ...]
    where: str

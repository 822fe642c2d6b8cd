"""Whole arrays, and the pieces of them that lie on the devices of a mesh. A shard is identified by the index
of its first element."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from mesh_tf_core.ir.dims import PaddedDim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program, Stored, Value
from mesh_tf_core.kernels.array_kernel import np_dtype

DevicePieces = list[Any]


class StackedPieces:
    """Values stacked over a loop's iterations, kept as their parts, a list with a piece per device for each:
    the loop that reads them again takes a part, no copy. They are stacked when first needed.

    Args:
      join: stacks the parts of one device: (parts, rank) -> tensor.
    """

    def __init__(self, parts: Sequence[DevicePieces], join: Callable[[DevicePieces, int], Any]) -> None:
        self.parts, self.join = list(parts), join
        self._whole: DevicePieces | None = None

    def map(self, fn: Callable[[DevicePieces], DevicePieces]) -> StackedPieces:
        return StackedPieces([fn(part) for part in self.parts], self.join)

    def whole(self) -> DevicePieces:
        """One stacked tensor per device; devices with the same parts share it."""
        if self._whole is None:
            made: dict[tuple[Any, ...], Any] = {}
            self._whole = []
            for rank in range(len(self.parts[0])):
                key = tuple(part[rank] for part in self.parts)
                if key not in made:
                    made[key] = self.join(list(key), rank)
                self._whole.append(made[key])
        return self._whole


def whole(pieces: DevicePieces | StackedPieces) -> DevicePieces:
    """The pieces of a value, stacked if it is still in parts."""
    return pieces.whole() if isinstance(pieces, StackedPieces) else pieces


Begin = tuple[int, ...]
"""Index of a piece's first element, per dimension."""
T = TypeVar("T")


@dataclass(frozen=True)
class VariablePiece:
    """A piece of a variable.

    Attributes:
      whole: shape of the variable.
      begin: where the piece begins in it; shape: how large it is.
    """

    name: str
    dtype: str
    whole: tuple[int, ...]
    begin: Begin
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, variable: Variable) -> Self:
        """A whole variable."""
        sizes = variable.shape.sizes
        return cls(variable.name, variable.dtype, sizes, (0,) * len(sizes), sizes)

    @property
    def key(self) -> str:
        """The piece's name in a file: `w` for all of w, else `w[0:4,8:16]`."""
        if self.shape == self.whole:
            return self.name
        ranges = (f"{b}:{b + n}" for b, n in zip(self.begin, self.shape, strict=True))
        return f"{self.name}[{','.join(ranges)}]"


def region(begin: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The slice of a whole array that a piece is."""
    return tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))


def per_device(v: Value, mesh: Mesh, ranks: Iterable[int], make: Callable[[Begin], T]) -> list[T]:
    """Calls `make` for every device's piece, once for all devices that hold the same one."""
    made: dict[Begin, T] = {}
    begins = [v.begin(mesh, rank) for rank in ranks]
    for begin in begins:
        if begin not in made:
            made[begin] = make(begin)
    return [made[begin] for begin in begins]


def joined(v: Value, mesh: Mesh, pieces: Mapping[Begin, Any]) -> Any:
    """The whole array."""
    out, sizes = np.empty(v.shape.sizes, np_dtype(v.dtype)), v.local(mesh).shape.sizes
    for begin, piece in pieces.items():
        out[region(begin, sizes)] = np.asarray(piece)
    return out


def initial(name: str, stored: Stored, begin: Sequence[int], extent: Sequence[int]) -> Any:
    """A piece of a variable's initial value."""
    variable = stored.variable

    def made(begin: Begin, extent: Sequence[int]) -> Any:
        sizes, dtype = variable.shape.sizes, np_dtype(variable.dtype)
        return variable.initializer.values(name, sizes, begin, extent, dtype).reshape(tuple(extent))

    return in_runs(stored, made)(tuple(begin), extent)


ReadPiece = Callable[[Begin, Sequence[int]], Any]
"""Gives the piece of a variable that begins at an index and has a shape."""


@dataclass(frozen=True)
class ContiguousRun:
    """Elements of a stored piece that are neighbours in the model's order too.

    Attributes:
      begin, sizes: where it begins in the variable, and its shape.
      within: the part of the piece that it is.
    """

    begin: Begin
    sizes: tuple[int, ...]
    within: tuple[slice, ...]


def runs(stored: Stored, begin: Begin, extent: Sequence[int]) -> list[ContiguousRun]:
    """The runs of the variable's elements in a stored piece, in stored order. Padding is in none."""
    shape, order, padded = stored.variable.shape, stored.variable.order, stored.padded
    parts: list[list[tuple[int, int, int]]]
    parts = [[(first, size, 0)] for first, size in zip(begin, extent, strict=True)]
    if order is not None:
        parts[0] = [*order.runs(shape.sizes[0], begin[0], extent[0])]
    if padded is not None:
        at = shape.index(padded.name)
        parts[at] = _counting(padded, begin[at], extent[at])
    found = []
    for run in itertools.product(*parts):
        first, sizes, offsets = zip(*run, strict=True) if run else ((), (), ())
        found.append(ContiguousRun(first, sizes, region(offsets, sizes)))
    return found


def _counting(dim: PaddedDim, begin: int, count: int) -> list[tuple[int, int, int]]:
    """Of stored elements from one on: those that count, run by run. (Where they begin in the variable, how
    many they are, and how far behind the first they lie.)"""
    length, found = dim.size // dim.pieces, []
    for run in range(begin // length, -(-(begin + count) // length)):
        first, last = max(begin, run * length), min(begin + count, run * length + dim.run)
        if first < last:
            found.append((run * dim.run + first - run * length, last - first, first - begin))
    return found


def in_runs(stored: Stored, read: ReadPiece) -> ReadPiece:
    """Turns a reader of pieces in the model's order into a reader of pieces in stored order."""
    if stored.variable.order is None and stored.padded is None:
        return read

    def lying(begin: Begin, extent: Sequence[int]) -> Any:
        out = np.zeros(tuple(extent), np_dtype(stored.variable.dtype))
        for run in runs(stored, begin, extent):
            out[run.within] = read(run.begin, run.sizes)
        return out

    return lying


def lying(stored: Stored, whole: Any) -> Any:
    """A whole variable in the order on devices, from one in the model's order."""
    if stored.variable.order is None and stored.padded is None:
        return whole
    whole, sizes = np.asarray(whole), stored.value.shape.sizes
    out = np.zeros(sizes, whole.dtype)
    for run in runs(stored, (0,) * len(sizes), sizes):
        out[run.within] = whole[region(run.begin, run.sizes)]
    return out


def in_order(stored: Stored, whole: Any) -> Any:
    """A whole variable in the model's order, from one in the order on devices."""
    if stored.variable.order is None and stored.padded is None:
        return whole
    whole = np.asarray(whole)
    out = np.empty(stored.variable.shape.sizes, whole.dtype)
    for run in runs(stored, (0,) * whole.ndim, whole.shape):
        out[region(run.begin, run.sizes)] = whole[run.within]
    return out


def writers(program: Program, processes: Sequence[int]) -> dict[str, dict[Begin, int]]:
    """For every variable, of each different piece the rank of the device from which it is written: of those
    that hold it one in the process that has had the fewest bytes to write so far.

    Args:
      processes: of every rank, the process that it is in.
    """
    mesh, load, found = program.mesh, Counter[int](), dict[str, dict[Begin, int]]()
    for name, stored in program.variables.items():
        v, holders = stored.value, dict[Begin, dict[int, int]]()
        for rank, process in enumerate(processes):
            holders.setdefault(v.begin(mesh, rank), {}).setdefault(process, rank)
        found[name] = {}
        for begin, ranks in holders.items():
            process = min(ranks, key=lambda process: (load[process], process))
            load[process] += v.local(mesh).bytes
            found[name][begin] = ranks[process]
    return found

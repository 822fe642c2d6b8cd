"""A mesh: the devices of one job as a grid with named axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mesh_tf_core.arguments import is_whole, shown
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import NAME

MOST_DEVICES = 1 << 20
"""The largest number of devices in one mesh: more than any job has."""
DIGITS = 20
"""The most digits read of a size: Python refuses thousands of them."""
NO_AXIS = ("none", "-")
"""The word in rules for no axis: the dimension is not split."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of devices with named axes. Ranks are in row-major order (the last axis varies fastest).

    Args:
      axes: a string such as `data:8;model:4`, a mapping name -> size, or pairs (name, size).

    Raises:
      UserError: a name or a size is invalid, a name occurs twice, or there are too many devices.

    Example:
      >>> import mesh_tf_core as mtf
      >>> mesh = mtf.Mesh("data:8;model:4")
      >>> mesh.names, mesh.size("data")
      (('data', 'model'), 8)
    """

    axes: tuple[tuple[str, int], ...]
    _sizes: dict[str, int] = field(init=False, repr=False, compare=False)

    def __init__(self, axes: str | Mapping[str, int] | Iterable[tuple[str, int]]) -> None:
        if isinstance(axes, str):
            pairs = tuple(_parse(axes))
        else:
            try:
                items = axes.items() if isinstance(axes, Mapping) else axes
                pairs = tuple((n, int(s) if is_whole(s) else s) for n, s in items)
            except (TypeError, ValueError):
                raise UserError(
                    f"mesh is {shown(axes)}; give the axes as 'data:2;model:4', or as a dict from names "
                    "to sizes"
                ) from None
        object.__setattr__(self, "axes", pairs)
        for name, size in pairs:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise UserError(
                    f"mesh axis name {name!r} is invalid; use a non-empty name without spaces and without "
                    "the characters ':;,+[]'"
                )
            if name in NO_AXIS:
                raise UserError(
                    f"mesh axis name {name!r} is reserved: in layout rules it means 'not split'; use another "
                    "name"
                )
            if type(size) is not int or size < 1:
                raise UserError(f"mesh axis {name!r}: size must be a positive integer, found {size!r}")
        names = [n for n, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"mesh {self}: axis {name!r} appears twice; give every axis its own name")
        if self.devices > MOST_DEVICES:
            raise UserError(
                f"mesh of {', '.join(names)}: more than {MOST_DEVICES:,} devices; use smaller axes"
            )
        object.__setattr__(self, "_sizes", dict(pairs))

    def __str__(self) -> str:
        return ";".join(f"{n}:{s}" for n, s in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s for _, s in self.axes)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def as_dict(self) -> dict[str, int]:
        return dict(self.axes)

    def size(self, axis: str) -> int:
        """Number of devices along one axis."""
        found = self._sizes.get(axis)
        if found is None:
            raise UserError(f"mesh {self} has no axis {axis!r}; {known_names(axis, self.names)}")
        return found

    def group_size(self, axes: Iterable[str]) -> int:
        """Number of devices in one group over `axes`."""
        return math.prod(self.size(a) for a in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of device `rank` along every axis."""
        out: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def group_index(self, rank: int, axes: Iterable[str]) -> int:
        """Position of device `rank` in its group over `axes` (the first axis given is the major one)."""
        coordinates, index = self.coordinates(rank), 0
        for axis in axes:
            index = index * self.size(axis) + coordinates[axis]
        return index

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Ranks that talk to each other in a collective over `axes`, each group in group-index order."""
        axes = tuple(axes)
        out: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for rank in range(self.devices):
            coordinates = self.coordinates(rank)
            key = tuple(coordinates[n] for n in self.names if n not in axes)
            out.setdefault(key, []).append((self.group_index(rank, axes), rank))
        return tuple(tuple(rank for _, rank in sorted(members)) for members in out.values())


def _parse(text: str) -> Iterable[tuple[str, int]]:
    for part in filter(None, (p.strip() for p in text.replace(",", ";").split(";"))):
        name, colon, size = part.partition(":")
        size = size.strip()
        if not colon or not (size.isascii() and size.isdigit()):
            raise UserError(f"mesh {text!r}: {part!r} is not an axis NAME:SIZE; write e.g. 'data:8;model:4'")
        yield name.strip(), int(size[:DIGITS])

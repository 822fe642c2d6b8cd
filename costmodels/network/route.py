"""The levels of links that a collective crosses."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.hardware import Number


@dataclass(frozen=True, slots=True)
class TorusSegment:
    """A group's part of one torus axis, equations (1) and (2).

    Attributes:
      axis: the torus axis.
      size: chips of the group along it.
      stride: links between neighbours of the group.
      ring: whether the ends are joined.
      ports: links through which a chip receives: 2 on a ring, 1 at the end of a line.
      rate: bytes/s that one chip receives for this group.
    """

    axis: str
    size: int
    stride: int
    ring: bool
    ports: int
    rate: float

    @property
    def hops(self) -> float:
        """Links that the farthest data crosses."""
        return self.stride * (self.size / 2 if self.ring else self.size - 1)

    @property
    def shift_hops(self) -> int:
        """Links that the farthest data of a cyclic shift by one crosses."""
        return self.stride * (1 if self.ring or self.size == 2 else self.size - 1)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a route: `size` members of the group, `rate` bytes/s into each, `latency` s per step."""

    name: str
    size: int
    rate: float
    latency: float
    segments: tuple[TorusSegment, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """The part of the network that a collective uses.

    Attributes:
      axes: the mesh axes of the collective.
      size: the number of devices in a group.
      devices: the number of devices in the mesh.
      levels: the levels of the network that a group uses.
      processes: the number of processes that a group spans, if the hardware states how devices are assigned
        to processes.
    """

    axes: tuple[str, ...]
    size: int
    devices: int
    levels: tuple[Level, ...]
    processes: int = 1

    def level(self, name: str) -> Level | None:
        """The level called `name`, None when the group does not use it."""
        return next((level for level in self.levels if level.name == name), None)

    @property
    def is_ring(self) -> bool:
        """True if it crosses only torus axes whose ends are joined."""
        return all(level.segments and all(s.ring for s in level.segments) for level in self.levels)

    def size_at(self, name: str) -> int:
        """Members of the group at a level; 1 when the group does not use it."""
        level = self.level(name)
        return level.size if level else 1


def by_group_size(table: tuple[tuple[int, Number], ...], size: int) -> float:
    """The number of the largest group size that is not above `size` (of the smallest one if all are)."""
    fitting = [number for n, number in table if n <= size] or [table[0][1]]
    return fitting[-1].value

"""Code that engines share: steps made of a feed and a run, variables shared with another engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from mesh_tf_core.engines import feeds
from mesh_tf_core.engines.pieces import Begin, VariablePiece
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.program import Program, Stored


class Stepping:
    """A step from its two halves (see `engines.protocol.Engine`)."""

    in_flight = 1
    program: Program

    @cached_property
    def _feeds(self) -> feeds.Feeds:
        return feeds.Feeds(self.program)

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.program.mesh.devices)

    def feed(self, batch: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def run(self, fed: Any) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self, fed: Any) -> Callable[[], dict[str, Any]]:
        found = self.run(fed)
        return lambda: found

    @property
    def variable_bytes(self) -> int:
        return self._held(host=False)

    @property
    def host_variable_bytes(self) -> int:
        return self._held(host=True)

    def _held(self, host: bool) -> int:
        raise NotImplementedError

    def write(self, name: str, array: Any) -> None:
        raise NotImplementedError

    def fill(self, name: str, read: Callable[[Begin, Sequence[int]], Any]) -> None:
        sizes = feeds.stored(self.program, name).variable.shape.sizes
        self.write(name, read((0,) * len(sizes), sizes))

    def step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self.run(self.feed(batch))


class OneByOne(Mapping[VariablePiece, Any]):
    """Values that are computed from stored data on access; the data are then released.

    Args:
      join: stored data -> value.
    """

    def __init__(self, kept: Mapping[VariablePiece, Any], join: Callable[[Any], Any]) -> None:
        self._kept: dict[VariablePiece, Any] = dict(kept)
        self._join = join

    def __getitem__(self, piece: VariablePiece) -> Any:
        return self._join(self._kept.pop(piece))

    def __iter__(self) -> Iterator[VariablePiece]:
        return iter(list(self._kept))

    def __len__(self) -> int:
        return len(self._kept)


def check_beside(program: Program, other: Program) -> None:
    """Raises UserError unless `other` can use the variables of `program`."""
    if other.mesh != program.mesh:
        raise UserError(
            f"two programs that share variables need the same mesh, found [{program.mesh}] and [{other.mesh}]"
        )
    for name, stored in other.variables.items():
        if name not in program.variables:
            raise UserError(
                f"a program reads variable {name!r}, which the program that stores the variables does not "
                f"have; {known_names(name, program.variables)}"
            )
        own = program.variables[name]
        if own.variable.order != stored.variable.order:
            raise UserError(
                f"the two programs assign the layers of variable {name!r} to different pipeline stages; use "
                "the same schedule for both"
            )
        if (own.value, own.variable.type) != (stored.value, stored.variable.type):
            raise UserError(
                f"variable {name!r} is {own.variable.type} split over {own.splits}{_where(own)} in the "
                f"program that stores it, but {stored.variable.type} split over {stored.splits}"
                f"{_where(stored)} in the program that reads it; use the same layout and storage for both"
            )


def _where(stored: Stored) -> str:
    return " on the host" if stored.host else ""

"""Named dimensions and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from mesh_tf_core.arguments import is_whole
from mesh_tf_core.errors import UserError, known_names

NAME = re.compile(r"[^\s:;,+\[\]\x00-\x1f\x7f-\x9f]+")
"""The names that dimensions and mesh axes may have: those that rules can contain and terminals can show."""
LARGEST = 2**48
"""Largest size of a dimension; a larger one is taken for a typing error."""


@cache
def divisors(size: int) -> tuple[int, ...]:
    """The divisors of a size, in order. Finding them takes no longer than the root of the size: it may be as
    large as `LARGEST`."""
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return tuple(dict.fromkeys((*small, *(size // n for n in reversed(small)))))


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of a tensor: a name, to which layouts refer, and a size in elements.

    Example:
      >>> import mesh_tf_core as mtf
      >>> print(mtf.Dim("batch", 8))
      batch:8
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise UserError(
                f"dimension name {self.name!r} is invalid; use a non-empty name without spaces and "
                "without the characters ':;,+[]'"
            )
        if type(self.size) is not int and is_whole(self.size):
            object.__setattr__(self, "size", int(self.size))  # one of NumPy's
        if type(self.size) is not int or self.size < 1:
            raise UserError(f"dimension {self.name!r}: size must be a positive integer, found {self.size!r}")
        if self.size > LARGEST:
            raise UserError(
                f"dimension {self.name!r}: size must be at most 2^48, found about "
                f"2^{self.size.bit_length() - 1}"
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"

    def part(self, ways: int) -> Dim:
        """One of so many equal pieces."""
        return Dim(self.name, self.size // ways)


@dataclass(frozen=True, slots=True)
class SparseDim(Dim):
    """A dimension of which every position of the others has few elements: of all experts those that a token
    chose. An array holds these alone, in `filled` places: on a device with some of the experts too, whose
    places of other devices' experts are then empty.

    Attributes:
      filled: elements at every position.
      whole: the size on all devices.
      imbalance: elements on the device with most of them over their mean, where devices share the dimension.
      groups, groups_filled: equal runs of the dimension, and how many of them a position's elements are in.
    """

    filled: int = 1
    whole: int = 1
    imbalance: float = 1.0
    groups: int = 1
    groups_filled: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.filled}of{self.size}"

    def part(self, ways: int) -> SparseDim:
        return replace(self, size=self.size // ways)

    @property
    def share(self) -> float:
        """How many of its elements there are on a device."""
        even = self.filled / self.whole
        return even if self.size == self.whole else min(1.0, even * self.imbalance, self.filled / self.size)


@dataclass(frozen=True, slots=True)
class PaddedDim(Dim):
    """A dimension of a stored value that is longer than its content, so that devices which do not divide the
    content can share it: in each of `pieces` equal runs the first elements count, and zeros follow.

    Attributes:
      real: number of elements that count.
    """

    real: int = 0
    pieces: int = 1

    @property
    def run(self) -> int:
        """Elements of a run that count."""
        return self.real // self.pieces

    @property
    def plain(self) -> Dim:
        """The dimension that it holds."""
        return Dim(self.name, self.real)


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """An ordered tuple of dimensions with unique names.

    Attributes:
      names, sizes: names and sizes of the dimensions, in order.
      size: number of elements; along a sparse dimension those that there are.

    Example:
      >>> import mesh_tf_core as mtf
      >>> shape = mtf.Shape([mtf.Dim("batch", 8), mtf.Dim("d_model", 4)])
      >>> shape.names, shape.size
      (('batch', 'd_model'), 32)
    """

    dims: tuple[Dim, ...]
    # What follows from `dims` is kept: lowering asks for it at every step.
    names: tuple[str, ...] = field(init=False, repr=False)
    sizes: tuple[int, ...] = field(init=False, repr=False)
    size: int = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __init__(self, dims: Iterable[Dim] = ()) -> None:
        found = tuple(dims)
        names = tuple(d.name for d in found)
        sizes = tuple(d.size for d in found)
        object.__setattr__(self, "dims", found)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "sizes", sizes)
        size = math.prod(sizes)
        for d in found:
            if isinstance(d, SparseDim):
                size = max(1, round(size * d.share))
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "_hash", hash((names, sizes)))
        if len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise UserError(f"shape [{self}]: dimension {twice!r} appears twice; rename one of the two")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.dims == other.dims)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Shape], tuple[tuple[Dim, ...]]]:
        return Shape, (self.dims,)  # another process hashes names otherwise

    def __iter__(self) -> Iterator[Dim]:
        return iter(self.dims)

    def __len__(self) -> int:
        return len(self.dims)

    def __contains__(self, dim: object) -> bool:
        return dim in self.dims or any(d.name == dim for d in self.dims)

    def __str__(self) -> str:
        return " ".join(map(str, self.dims))

    def index(self, name: str) -> int:
        """Position of the dimension called `name`."""
        for i, d in enumerate(self.dims):
            if d.name == name:
                return i
        raise UserError(f"shape [{self}] has no dimension {name!r}; {known_names(name, self.names)}")

    def dim(self, name: str) -> Dim:
        return self.dims[self.index(name)]

    def without(self, *names: str) -> Shape:
        return Shape(d for d in self.dims if d.name not in names)

    @property
    def padded(self) -> PaddedDim | None:
        """The padded dimension, if there is one."""
        return next((d for d in self.dims if isinstance(d, PaddedDim)), None)

    @property
    def sparse(self) -> SparseDim | None:
        """The sparse dimension, if there is one."""
        return next((d for d in self.dims if isinstance(d, SparseDim)), None)

    @property
    def places(self) -> Shape:
        """The shape of the array that holds it: of a sparse dimension its places."""
        thin = self.sparse
        return self if thin is None else self.resized(Dim(thin.name, thin.filled))

    def resized(self, dim: Dim) -> Shape:
        """With another dimension of its name, if it has one."""
        return Shape(dim if d.name == dim.name else d for d in self.dims)

    def replace(self, **sizes: int) -> Shape:
        """The same names with other sizes for those given."""
        return Shape(Dim(d.name, sizes.get(d.name, d.size)) for d in self.dims)


def union(*shapes: Shape) -> Shape:
    """All dimensions of the shapes in order of first appearance; sizes of equal names must agree."""
    seen: dict[str, Dim] = {}
    for shape in shapes:
        for d in shape:
            first = seen.setdefault(d.name, d)
            if isinstance(first, SparseDim) != isinstance(d, SparseDim):
                raise UserError(
                    f"dimension {d.name!r} has only the experts that each token chose in one operand, and "
                    "all in the other; multiply by a matrix of each expert with ops.experts.expert_product"
                )
            if first.size != d.size:
                listing = ", ".join(f"[{s}]" for s in shapes)
                raise UserError(
                    f"dimension {d.name!r} has size {seen[d.name].size} in one operand and {d.size} in "
                    f"another: {listing}; rename one of the dimensions, or make the sizes equal"
                )
    return Shape(seen.values())

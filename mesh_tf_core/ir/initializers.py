"""Variables, and their initial values: any piece of a variable can be made by itself, so every layout starts
alike."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.dtypes import TensorType, itemsize


def _uniform(seed: int, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
    """float64 in (0, 1) by global element index: a 64-bit finaliser (splitmix64, Steele et al. 2014)."""
    index = np.zeros((), np.uint64)
    for axis, (size, first, count) in enumerate(zip(sizes, begin, extent, strict=True)):
        positions = np.arange(first, first + count, dtype=np.uint64)
        index = index * np.uint64(size) + positions.reshape(
            [count if i == axis else 1 for i in range(len(sizes))]
        )
    with np.errstate(over="ignore"):
        z = (np.broadcast_to(index, tuple(extent)) + np.uint64(seed + 1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


class Initializer:
    """Gives any block of a variable's initial value."""

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        """float64 array [extent]: the block that starts at `begin` of a variable of `sizes`.

        Args:
          name: the variable's name, from which its random numbers are seeded.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Initializer):
    """One value everywhere."""

    value: float = 0.0

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        return np.full(tuple(extent), self.value, np.float64)


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal numbers of mean 0, cut off at 2 standard deviations."""

    stddev: float
    seed: int = 0
    limit: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.stddev) and self.stddev >= 0):
            raise UserError(f"Normal: stddev must be a finite number >= 0, found {self.stddev}")

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        from scipy.special import ndtr, ndtri

        low = ndtr(-self.limit)
        u = _uniform(_seed(name, self.seed), sizes, begin, extent)
        return ndtri(low + u * (1 - 2 * low)) * self.stddev


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform numbers in [low, high)."""

    low: float
    high: float
    seed: int = 0

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        u = _uniform(_seed(name, self.seed), sizes, begin, extent)
        return self.low + u * (self.high - self.low)


def _seed(name: str, seed: int) -> int:
    return zlib.crc32(name.encode()) + (seed << 32)


ZEROS = Constant(0.0)
ONES = Constant(1.0)


@dataclass(frozen=True)
class Variable:
    """A named tensor that outlives a step.

    Attributes:
      stacked: how many leading dimensions count layers (a scan made them).
      slot_of: for an optimizer's state, the name of the variable that it belongs to.
    """

    name: str
    shape: Shape
    dtype: str
    initializer: Initializer = field(compare=False)
    trainable: bool = True
    stacked: int = 0
    slot_of: str | None = None

    @property
    def bytes(self) -> int:
        return self.shape.size * itemsize(self.dtype)

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype)

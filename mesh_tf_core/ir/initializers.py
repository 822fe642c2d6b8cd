"""Variables and their initial values: any shard of a variable can be computed independently, so every layout
has the same initial values.

Arrays that are given to a model: they never change, and compare by their elements.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mesh_tf_core.cores import cores
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import DTYPES, TensorType, is_float, itemsize, whole_numbers
from mesh_tf_core.ir.stage_orders import Interleaved

_OWN = ("float32", "bfloat16", "float16", "uint32", "int8", "bool")
"""Element types that an array keeps unless it is asked for in another."""


class FixedArray:
    """An array that cannot be changed: a copy, unless the given array is read-only."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        if self.array.flags.writeable:
            self.array = self.array.copy()
            self.array.setflags(write=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of type, shape and elements."""
        a = self.array
        held = hashlib.sha256(f"{a.dtype} {a.shape}".encode())
        held.update(a.tobytes())
        return held.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedArray) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return self.digest[:12]

    def __deepcopy__(self, memo: Any) -> FixedArray:
        return self


def numbers(what: str, given: Any) -> Any:
    """Numbers or truth values as an array; UserError, which names `what`, for anything else."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise UserError(
            f"{what}: the value cannot be converted to an array ({error}); give nested lists of equal "
            "lengths, or an array"
        ) from None
    if str(array.dtype) not in DTYPES and array.dtype.kind not in "fiu":
        raise UserError(
            f"{what}: expected an array of numbers, found dtype {array.dtype}, shape {array.shape}"
        )
    return array


def usual_dtype(array: Any) -> str:
    """The default element type of an array in a model: float32 for float64, int32 for integers that it can
    represent."""
    name = str(array.dtype)
    if name in _OWN:
        return name
    if array.dtype.kind == "f":
        return "float32"
    low, high = whole_numbers("int32")
    return "int32" if not array.size or (array.min() >= low and array.max() <= high) else "int64"


def check_numbers(what: str, array: Any, dtype: str) -> None:
    """UserError if an element is not a number of a dtype: a fraction is never cut off."""
    if is_float(dtype) or not array.size:
        return
    low, high = whole_numbers(dtype)
    wide = array.astype(np.float64) if array.dtype.kind not in "iub" else array
    wrong = wide[(wide != np.floor(wide)) | (wide < low) | (wide > high)]
    if wrong.size:
        raise UserError(f"{what}: {dtype} cannot represent {wrong.flat[0]}; choose another dtype")


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


PART = 1 << 18
"""Elements that are made at once; their float64 numbers stay in a processor's cache."""


def _parts(extent: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """A block cut along its leading dimensions into parts of at most `PART` elements."""
    axis = next(i for i in range(len(extent)) if math.prod(extent[i + 1 :]) <= PART)
    rows = PART // math.prod(extent[axis + 1 :])
    for place in np.ndindex(*extent[:axis]):
        for start in range(0, extent[axis], rows):
            cut = slice(start, min(start + rows, extent[axis]))
            yield (*(slice(i, i + 1) for i in place), cut, *(slice(0, n) for n in extent[axis + 1 :]))


class Initializer:
    """Gives any block of a variable's initial value.

    Attributes:
      elementwise: elements do not depend on each other, so a large block may be computed in parts.
    """

    elementwise: ClassVar[bool] = False

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        """float64 array [extent]: the block that starts at `begin` of a variable of `sizes`.

        Args:
          name: the variable's name, from which its random numbers are seeded.
        """
        raise NotImplementedError

    def values(
        self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int], dtype: Any
    ) -> Any:
        """The same block as an array of a NumPy type.

        Threads compute the parts of a large one: NumPy computes without Python's lock, and float64
        temporaries stay small.
        """
        if not self.elementwise or math.prod(extent) <= PART:
            return np.asarray(self.piece(name, sizes, begin, extent)).astype(dtype)
        out = np.empty(tuple(extent), dtype)

        def fill(part: tuple[slice, ...]) -> None:
            first = [b + s.start for b, s in zip(begin, part, strict=True)]
            out[part] = self.piece(name, sizes, first, [s.stop - s.start for s in part])

        with ThreadPoolExecutor(cores()) as threads:
            list(threads.map(fill, _parts(extent)))
        return out

    def bound(self, name: str, type: TensorType, stacked: int) -> Initializer:
        """Binds to a variable of this name, whose first `stacked` dimensions count layers; UserError if it
        cannot initialise that variable."""
        return self


@dataclass(frozen=True)
class Constant(Initializer):
    """One value everywhere."""

    value: float = 0.0
    elementwise: ClassVar[bool] = True

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        return np.full(tuple(extent), self.value, np.float64)


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal numbers of mean 0, cut off at 2 standard deviations."""

    stddev: float
    seed: int = 0
    limit: ClassVar[float] = 2.0
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.stddev) and self.stddev >= 0):
            raise UserError(f"Normal: stddev must be a finite number of at least 0, found {self.stddev}")

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
    elementwise: ClassVar[bool] = True

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        u = _uniform(_seed(name, self.seed), sizes, begin, extent)
        return self.low + u * (self.high - self.low)


@dataclass(frozen=True)
class FromArray(Initializer):
    """The elements of an array with the variable's shape, or with one layer's shape for all layers."""

    array: FixedArray

    def bound(self, name: str, type: TensorType, stacked: int) -> Initializer:
        shape, found = type.shape, self.array.array.shape
        if found not in (shape.sizes, shape.sizes[stacked:]):
            layers = f" (or {list(shape.sizes[stacked:])} for every layer alike)" if stacked else ""
            raise UserError(
                f"variable {name!r} [{shape}]: the initial array has shape {list(found)}; give shape "
                f"{list(shape.sizes)}{layers}"
            )
        check_numbers(f"variable {name!r}: initial array", self.array.array, type.dtype)
        return self

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        whole = np.broadcast_to(self.array.array, tuple(sizes))
        return whole[tuple(slice(b, b + n) for b, n in zip(begin, extent, strict=True))]


@dataclass(frozen=True)
class FromFunction(Initializer):
    """Takes values from a function of the model: fn(rng, shape) -> array of that shape.

    The function computes a whole variable (for a stack, that of one layer) and each device takes its shard,
    so initial values are the same under every layout. All random numbers of the function must come from
    `rng`; it is called twice, and a function with different results is refused.

    Attributes:
      fn: function of a `numpy.random.Generator`, which differs by name, layer and seed, and a shape; a JAX
        key is `jax.random.key(rng.integers(2**31))`.
      stacked: number of leading dimensions that count layers; the graph sets it.
    """

    fn: Callable[[np.random.Generator, tuple[int, ...]], Any]
    seed: int = 0
    stacked: int = 0

    def bound(self, name: str, type: TensorType, stacked: int) -> Initializer:
        return replace(self, stacked=stacked)

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        n, own = self.stacked, tuple(sizes[self.stacked :])
        inside = tuple(slice(b, b + e) for b, e in zip(begin[n:], extent[n:], strict=True))
        out: Any = None
        for place in np.ndindex(*extent[:n]):
            layer = tuple(b + p for b, p in zip(begin[:n], place, strict=True))
            made = self._one(name, own, np.ravel_multi_index(layer, tuple(sizes[:n])) if n else 0)
            out = np.empty(tuple(extent), made.dtype) if out is None else out
            out[place] = made[inside]
        return out

    def _one(self, name: str, shape: tuple[int, ...], layer: Any) -> Any:
        """One layer's whole value."""
        what = f"variable {name!r}: initializer {getattr(self.fn, '__name__', self.fn)}"
        seed = [self.seed, zlib.crc32(name.encode()), int(layer)]
        made, again = (numbers(what, self.fn(np.random.default_rng(seed), shape)) for _ in range(2))
        if made.shape != shape:
            raise UserError(
                f"{what} returned an array of shape {list(made.shape)}; it must return shape {list(shape)}"
            )
        if not np.array_equal(made, again, equal_nan=made.dtype.kind == "f"):
            raise UserError(
                f"{what} returned different numbers in two calls with the same seed, so the initial values "
                "would depend on the layout; draw all random numbers from the generator that it receives"
            )
        return made


Initial = Initializer | Callable[[np.random.Generator, tuple[int, ...]], Any] | Any
"""The accepted initial values of a variable: an initializer, a number, an array, or a function as of
`FromFunction`."""


def initializer(what: str, given: Initial) -> Initializer:
    """Converts a value to an initializer; UserError, which names `what`, if that is impossible."""
    if isinstance(given, Initializer):
        return given
    if isinstance(given, type) and issubclass(given, Initializer):
        raise UserError(f"{what}: {given.__name__} is a class; write mtf.{given.__name__}(...)")
    if callable(given):
        return FromFunction(given)
    array = numbers(f"{what}: initial value", given)
    return FromArray(FixedArray(array)) if array.shape else Constant(array.item())


def _seed(name: str, seed: int) -> int:
    return zlib.crc32(name.encode()) + (seed << 32)


ZEROS = Constant(0.0)
ONES = Constant(1.0)


@dataclass(frozen=True)
class Variable:
    """A named tensor that outlives a step.

    Attributes:
      stacked: number of leading dimensions that count layers (a scan made them).
      slot_of: for an optimizer's state, the name of the variable that it belongs to.
      order: order of its first dimension on the devices; None: the model's order.
      even: its shards have equal sizes without padding, as another library holds them.
      members: for a stack of arrays that another library holds one by one, their names, in order.
      captured: a function closes over it, so each device of the user's program holds all of it.
    """

    name: str
    shape: Shape
    dtype: str
    initializer: Initializer = field(compare=False)
    trainable: bool = True
    stacked: int = 0
    slot_of: str | None = None
    order: Interleaved | None = None
    even: bool = False
    members: tuple[str, ...] = field(default=(), compare=False)
    captured: bool = False

    @property
    def bytes(self) -> int:
        return self.shape.size * itemsize(self.dtype)

    @property
    def own_storage(self) -> bool:
        """True if its storage is a question of its own: an array, no optimizer's state, not captured."""
        return self.slot_of is None and not self.captured and len(self.shape) > 0

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype)

    @property
    def lying(self) -> TensorType:
        """The type that it has in graphs: with the layers that stages lack (see `Interleaved`)."""
        if self.order is None:
            return self.type
        layers = self.shape.dims[0]
        return TensorType(self.shape.resized(Dim(layers.name, self.order.size(layers.size))), self.dtype)

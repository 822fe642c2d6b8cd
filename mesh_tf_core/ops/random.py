"""Random numbers that do not depend on the layout: a counter-based generator of a key and of the element's
place in the whole tensor, so a device computes only its own elements.

The generator is Threefry-2x32 with 13 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1,
2, 3": the fewest that pass BigCrush). It turns 64 bits of counter into 64 random bits, one to
one, so no two elements of a tensor have the same bits because of where they are. The second half of the key
counts values that exceed the counter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import check_dtype
from mesh_tf_core.ir.kernel import At, Kernel, PartRows
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import StopGradient, constant_like
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.kinds import Elementwise, NoGradient, need_fractions

_ROUNDS = 13
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA
"""Of the key schedule: so that no key is all zeros."""
_WORK = 40.0
"""Operations for a number, of which a counter gives two: 5 a round, 3 for each change of keys."""
_SECOND = 0x632BE5AB
"""Turns a key into that of a second stream."""


def _add(k: Kernel, x: Any, y: Any) -> Any:
    return k.binary("add", x, y)


def _constant(k: Kernel, value: int) -> Any:
    return k.scalar(value, "uint32")


def threefry(k: Kernel, key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two words of random bits for every counter: all are uint32, and broadcast."""
    third = k.binary("bit_xor", k.binary("bit_xor", *key), _constant(k, _PARITY))
    keys = (*key, third)
    x, y = (_add(k, c, part) for c, part in zip(counter, key, strict=True))
    for i in range(_ROUNDS):
        r = _ROTATIONS[i % 8]
        x = _add(k, x, y)
        up = k.binary("mul", y, _constant(k, 1 << r))
        y = k.binary("bit_xor", up, k.binary("shift_right", y, _constant(k, 32 - r)))
        y = k.binary("bit_xor", y, x)
        if i % 4 == 3:
            n = i // 4 + 1
            x = _add(k, x, keys[n % 3])
            y = _add(k, y, _add(k, keys[(n + 1) % 3], _constant(k, n)))
    return x, y


Places = Mapping[str, tuple[int, Any]]
"""Dimension -> its size in the whole tensor, and the index of a device's first element."""


def places_of(k: Kernel, at: At, rows: PartRows | None, number: Any) -> Places:
    """The positions of a part's rows in the whole batch.

    Args:
      number: of the part, an int32 scalar.
    """
    found: dict[str, tuple[int, Any]] = {}
    for d in rows.batch if rows else ():
        assert rows is not None
        ahead = k.binary("mul", k.cast(number, "uint32"), _constant(k, rows.size))
        found[d.name] = d.size, _add(k, ahead, k.scalar(at.offset(d.name), "uint32"))
    return found


def rows(k: Kernel, at: At, shape: Shape, places: Places | None = None) -> tuple[Any, Any]:
    """Which row of the whole tensor each of a device's is: two numbers, uint32, each [shape] or with some
    dimensions of size 1. The first counts the rows of the last dimensions, as far as 32 bits reach.

    Args:
      places: places of dimensions that differ from the device's shard.
    """
    known = {d.name: (d.size * at.ways.get(d.name, 1), at.offset(d.name)) for d in shape}
    known |= places or {}
    sizes = [known[d.name][0] for d in shape]
    first = len(sizes)
    while first and math.prod(sizes[first - 1 :]) <= 2**32:
        first -= 1
    parts = range(first, len(sizes)), range(first)
    low, high = (_place(k, known, shape, axes) for axes in parts)
    return low, high


def _place(k: Kernel, known: Places, shape: Shape, axes: Sequence[int]) -> Any:
    """The place in the whole tensor along some axes together, row by row."""
    place = k.full([1] * len(shape), 0, "uint32")
    for axis in axes:
        d = shape.dims[axis]
        size, first = known[d.name]
        along = _along(k, d.size, first if d.size < size else 0)
        along = k.reshape(along, [d.size if i == axis else 1 for i in range(len(shape))])
        place = _add(k, k.binary("mul", place, _constant(k, size)), along)
    return place


def _along(k: Kernel, count: int, first: Any) -> Any:
    """`count` numbers from the `first` on, uint32."""
    along = k.iota(count, "uint32")
    return along if type(first) is int and not first else _add(k, along, k.scalar(first, "uint32"))


def uniform(k: Kernel, key: Any, row: tuple[Any, Any], n: int, first: Any = 0, single: bool = False) -> Any:
    """float32 in [0, 1), from 24 random bits each, of n elements of every row.

    Args:
      key: int32 or uint32 scalar.
      row: as `rows` gives it, with a last axis of size 1 more.
      first: which of its row the first element is; unless `single`, a multiple of n.
    """
    low, high = row
    # A pair of elements shares a counter; where n is odd, both ends may cut one.
    if single := bool(single or n % 2):
        along = _along(k, n, first)
    else:
        along = k.iota(n // 2, "uint32")
        along = _add(k, along, k.binary("shift_right", k.scalar(first, "uint32"), _constant(k, 1)))
    along = k.reshape(along, [*(1 for _ in low.shape[1:]), *along.shape])
    return k.together(_single if single else _paired, k.cast(key, "uint32"), low, high, along)


def _paired(k: Kernel, key: Any, low: Any, high: Any, along: Any) -> Any:
    """Numbers of the elements at 2 along, 2 along + 1, ... of every row."""
    words = threefry(k, (key, high), (low, along))
    sizes = [*words[0].shape]
    made = k.concat([k.reshape(w, [*sizes, 1]) for w in words], len(sizes))
    return _fraction(k, k.reshape(made, [*sizes[:-1], 2 * sizes[-1]]))


def _single(k: Kernel, key: Any, low: Any, high: Any, along: Any) -> Any:
    """Numbers of the elements at `along` of every row."""
    x, y = threefry(k, (key, high), (low, k.binary("shift_right", along, _constant(k, 1))))
    odd = k.cast(k.binary("bit_and", along, _constant(k, 1)), "bool")
    return _fraction(k, k.where(odd, y, x))


def _fraction(k: Kernel, bits: Any) -> Any:
    top = k.binary("shift_right", bits, _constant(k, 8))
    return k.binary("mul", k.cast(k.cast(top, "int32"), "float32"), k.scalar(2.0**-24, "float32"))


def _uniform(k: Kernel, at: At, key: Any, places: Places) -> Any:
    """The same of an operation's first output."""
    shape = at.outputs[0].shape
    *others, last = shape.dims or (Dim("one", 1),)
    low, high = (k.reshape(x, [*x.shape, 1]) for x in rows(k, at, Shape(others), places))
    _, first = places.get(last.name, (0, at.offset(last.name)))
    found = uniform(k, key, (low, high), last.size, first, single=last.name in places)
    return k.broadcast_to(found, shape.sizes) if shape else k.reshape(found, ())


_ODD = 0x9E3779B1
_MIXING = ((0x7FEB352D, 16), (0x846CA68B, 15), (None, 16))


def folded(key: int, number: int) -> int:
    """The key that `FoldIn` makes of a known key and number: mix(key * odd ^ number), below 2**32."""
    x = (key * _ODD ^ number) % 2**32
    for multiplier, shift in _MIXING:
        x ^= x >> shift
        x = x * (multiplier or 1) % 2**32
    return x


def mix(k: Kernel, x: Any) -> Any:
    """The 32-bit finaliser `lowbias32` (Wellons, "Prospecting for Hash Functions", 2018) of uint32 values."""
    for multiplier, shift in _MIXING:
        x = k.binary("bit_xor", x, k.binary("shift_right", x, _constant(k, shift)))
        if multiplier is not None:
            x = k.binary("mul", x, _constant(k, multiplier))
    return x


@dataclass(frozen=True)
class FoldIn(NoGradient, Elementwise):
    """A new key from numbers (int32 scalars), one after the other: mix(key * odd ^ number), from the salt on.

    Attributes:
      salt: the key that is begun with; None: the first operand is.
      path: numbers that are known, None for the next operand; operands behind it are last. Equal numbers in
        the same order make one key, known or not.
    """

    salt: int | None
    path: tuple[int | None, ...] = ()
    kind: ClassVar[str] = "data"
    free: ClassVar[bool] = True
    derives_key: ClassVar[bool] = True
    element_flops: ClassVar[float] = 0.0

    def infer(self, *inputs: TensorType) -> TensorType:
        for t in inputs:
            if t.dtype != "int32" or len(t.shape):
                raise UserError(f"fold_in: each key must be an int32 scalar, found {t}")
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        operands = [k.cast(x, "uint32") for x in slices]
        key = operands.pop(0) if self.salt is None else _constant(k, self.salt % 2**32)
        numbers = [operands.pop(0) if n is None else _constant(k, n % 2**32) for n in self.path]
        for x in (*numbers, *operands):
            key = mix(k, k.binary("bit_xor", k.binary("mul", key, _constant(k, _ODD)), x))
        return k.cast(key, "int32")

    def describe(self) -> str:
        path = f", path={self.path}" if self.path else ""
        return f"{self.name}(salt={self.salt}{path})"


@dataclass(frozen=True)
class Drawn(NoGradient, abstract=True):
    """Draws a number for every element of its output, from a key.

    Attributes:
      rows: of the whole batch, that a part of it has; the number of the part is the last operand then. None:
        it works on all rows.
    """

    rows: PartRows | None = field(default=None, kw_only=True)
    kind: ClassVar[str] = "random"
    given: ClassVar[int] = 1
    """The number of operands without the number of a part; the last one is the key."""

    def of_part(self, rows: PartRows) -> tuple[Op, int]:
        return replace(self, rows=rows), self.given

    def drawn(self, k: Kernel, at: At, slices: Sequence[Any], turned: int = 0) -> Any:
        """Uniform numbers of the output's elements; `turned`: of another stream."""
        key, *number = slices[self.given - 1 :]
        key = k.binary("bit_xor", k.cast(key, "uint32"), _constant(k, turned)) if turned else key
        return _uniform(k, at, key, places_of(k, at, self.rows, *(number or [None])))


@dataclass(frozen=True)
class Dropout(Drawn, Elementwise):
    """Zeroes a fraction `rate` of x and scales the rest by 1/(1-rate), decided by a key: inputs (x, key)."""

    rate: float
    given: ClassVar[int] = 2
    element_flops: ClassVar[float] = _WORK

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise UserError(f"dropout: rate must be at least 0 and less than 1, found {self.rate}")

    def infer(self, *inputs: TensorType) -> TensorType:
        need_fractions("dropout", inputs[0])
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, dtype = slices[0], at.outputs[0].dtype
        keep = k.binary("ge", self.drawn(k, at, slices), k.scalar(self.rate, "float32"))
        return k.where(keep, k.binary("mul", x, k.scalar(1 / (1 - self.rate), dtype)), k.scalar(0, dtype))

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return [dy.graph.apply(self, dy, *inputs[1:]), *super().gradient(dy, inputs[1:], output)]

    def untrained(self) -> tuple[Op, int]:
        return StopGradient(), 1


@dataclass(frozen=True)
class Sampled(Drawn, abstract=True):
    """Numbers of a shape and type, from a key."""

    shape: Shape
    dtype: str

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=self.shape.names)

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(self.shape, check_dtype(self.dtype))

    def flops(self, *local: TensorType) -> float:
        return _WORK * self.shape.size


@dataclass(frozen=True)
class RandomUniform(Sampled):
    """Uniform numbers in [low, high)."""

    low: float
    high: float

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        def scaled(x: Any, by: float) -> Any:
            return k.binary("mul", x, k.scalar(by, "float32"))

        x, bits = self.drawn(k, at, slices), uniform_bits(self.dtype)
        if bits < 24:
            x = scaled(k.unary("floor", scaled(x, 2.0**bits)), 2.0**-bits)
        x = k.binary("add", scaled(x, self.high - self.low), k.scalar(self.low, "float32"))
        return k.cast(x, self.dtype)


@dataclass(frozen=True)
class RandomNormal(Sampled):
    """Normal numbers of a mean and a standard deviation (Box & Muller 1958)."""

    mean: float
    stddev: float

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        def number(value: float) -> Any:
            return k.scalar(value, "float32")

        # 1 - u is in (0, 1], where the logarithm is finite.
        log = k.unary("log", k.binary("sub", number(1.0), self.drawn(k, at, slices)))
        radius = k.unary("sqrt", k.binary("mul", log, number(-2.0)))
        angle = k.binary("mul", self.drawn(k, at, slices, _SECOND), number(2 * math.pi))
        x = k.binary("mul", k.binary("mul", radius, k.unary("cos", angle)), number(self.stddev))
        return k.cast(k.binary("add", x, number(self.mean)), self.dtype)

    def flops(self, *local: TensorType) -> float:
        return (2 * _WORK + 20.0) * self.shape.size


def uniform_bits(dtype: str) -> int:
    """Random bits of a uniform number: with more, its type would round some up to the end of the range."""
    return {"bfloat16": 8, "float16": 11}.get(dtype, 24)


def dropout(
    x: Tensor, rate: float, key: Tensor | None = None, noise_shape: Sequence[Dim] | Shape | None = None
) -> Tensor:
    """Dropout with the same mask under every layout; `key` defaults to a new key of the graph, per step
    and layer.

    Args:
      noise_shape: dimensions of x with independent masks; along the others all elements are kept or zeroed
        together (None: every element has its own mask).
    """
    if rate == 0:
        return x
    key = key if key is not None else x.graph.random_key()
    if noise_shape is None:
        return x.graph.apply(Dropout(rate), x, key)
    noise = Shape(noise_shape)
    for d in noise:
        if x.shape.dim(d.name) != d:
            raise UserError(
                f"dropout of [{x.shape}]: noise_shape has dimension {d}, but x has {x.shape.dim(d.name)}; "
                "make the sizes equal"
            )
    ones = broadcast(constant_like(x, 1.0), noise)
    return x * x.graph.apply(Dropout(rate), ones, key)


def random_uniform(
    key: Tensor, shape: Shape | Sequence[Dim], low: float = 0.0, high: float = 1.0, dtype: str = "float32"
) -> Tensor:
    """Uniform numbers in [low, high)."""
    return key.graph.apply(RandomUniform(Shape(shape), dtype, low, high), key)


def random_normal(
    key: Tensor, shape: Shape | Sequence[Dim], mean: float = 0.0, stddev: float = 1.0, dtype: str = "float32"
) -> Tensor:
    """Normal numbers."""
    return key.graph.apply(RandomNormal(Shape(shape), dtype, mean, stddev), key)

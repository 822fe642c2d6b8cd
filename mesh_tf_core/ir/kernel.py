"""The kernel protocol: the array functions that operations may use.

An implementation is a class with these methods over its own array type `T`. Axes are positions; shapes are
tuples of Python integers. NumPy's is `kernels.numpy_kernel.NumpyKernel`; the other kernels must agree with it
(tests/kernels).

Functions that work element by element, and those that join elements along axes, are rows of tables. A kernel
takes a function from its library by the name in the row, unless it defines its own (`kernels.array_kernel`,
`kernels.tf_kernel`). The tables also have the facts that operations and cost models need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.dtypes import TensorType

T = Any

LoopStep = Callable[[Any, Sequence[T]], tuple[list[T], list[T]]]
"""One iteration of `Kernel.loop`."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The padding of an axis: `apart` - 1 zeros between its elements, `before` ahead of them (cut off if
    negative), and zeros behind (or a cut) up to `length`."""

    apart: int
    before: int
    length: int

    def after(self, size: int) -> int:
        """Zeros behind `size` elements, negative if some are cut off."""
        return self.length - self.before - ((size - 1) * self.apart + 1)


class Kernel(Protocol):
    """Array functions of one library. `fn` is a name of the tables: `UNARY`, `BINARY` or `REDUCE`.

    Attributes:
      compares: XLA compiles them: a comparison with positions becomes part of the kernel that makes an array,
        where `take` needs the array in memory, flat.
    """

    compares: bool

    def unary(self, fn: str, x: T) -> T:
        """fn in UNARY, element by element."""

    def binary(self, fn: str, x: T, y: T) -> T:
        """fn in BINARY with NumPy broadcasting; comparisons give bool."""

    def where(self, condition: T, x: T, y: T) -> T: ...

    def reduce(self, fn: str, x: T, axes: Sequence[int]) -> T:
        """fn in REDUCE over axes, which disappear."""

    def einsum(self, spec: str, *xs: T) -> T:
        """NumPy's einsum with an explicit output; bfloat16 and float16 accumulate in float32 where
        possible; two of float8 give float32."""

    def conv(self, x: T, w: T, strides: Sequence[int], dilations: Sequence[int]) -> T:
        """Correlation without padding of x [n, 1 to 3 spatial axes, in] with w [spatial axes, in, out]."""

    def padded_conv(
        self, x: T, w: T, strides: Sequence[int], dilations: Sequence[int], edges: Sequence[Edge]
    ) -> T | None:
        """The same of x with its spatial axes padded, where the library needs no padded array in memory; None
        if it does."""

    def softmax(self, x: T, axis: int) -> T: ...

    def logsumexp(self, x: T, axis: int) -> T: ...

    def exp_less(self, x: T, total: T, axis: int, own: bool) -> T:
        """exp(x - total), where total has size 1 along the axis; `own` means that total is the log-sum-exp of
        x along it, so the result is x's softmax."""

    def cumsum(self, x: T, axis: int, exclusive: bool, reverse: bool) -> T: ...

    def argmax(self, x: T, axis: int) -> T:
        """int32 position of the first largest element."""

    def top_k(self, x: T, n: int) -> tuple[T, T]:
        """Values and int32 positions of the n largest along the last axis, largest first, ties by
        position."""

    def reshape(self, x: T, shape: Sequence[int]) -> T: ...

    def transpose(self, x: T, permutation: Sequence[int]) -> T: ...

    def broadcast_to(self, x: T, shape: Sequence[int]) -> T: ...

    def concat(self, xs: Sequence[T], axis: int) -> T: ...

    def slice(self, x: T, begin: Sequence[Any], sizes: Sequence[int]) -> T:
        """A block; `begin` may hold integer scalars of the library."""

    def put(self, x: T, piece: T, axis: int, place: Any) -> T:
        """x with `piece`, which lacks the axis, at index `place` (an integer scalar of the library)."""

    def add_at(self, x: T, values: T, ids: T, axis: int) -> T:
        """x with `values` added at the valid index `ids` along the axis, one for every position of the other
        axes: both have x's shape without the axis."""

    def pad(self, x: T, paddings: Sequence[tuple[int, int]], value: float = 0.0) -> T: ...

    def flip(self, x: T, axis: int) -> T: ...

    def take(self, table: T, ids: T) -> T:
        """Rows of `table` (axis 0) for valid ids of any shape: shape ids.shape + table.shape[1:]."""

    def segment_sum(self, x: T, ids: T, n: int, most: bool = False) -> T:
        """Sums rows of x (leading axes = ids' axes) into n rows; ids < 0 are dropped. With `most` the largest
        elements; -inf where there are none."""

    def grouped(self, x: T, w: T, ids: T, groups: int) -> T:
        """Rows x [rows, k] times the matrix of their group, of w [n, k, m]: [rows, m]. The ids [rows] never
        decrease; rows whose id is not in 0 .. n - 1 give zeros. `groups` are those on all devices: with all
        of them, no id is negative."""

    def grouped_outer(self, x: T, y: T, ids: T, n: int, groups: int) -> T:
        """Products of rows x [rows, k] and y [rows, m], summed group by group: [n, k, m]; as `grouped`."""

    def full(self, shape: Sequence[int], value: float, dtype: str) -> T: ...

    def iota(self, n: int, dtype: str) -> T: ...

    def array(self, values: Any, dtype: str) -> T:
        """Constants, of any shape: an array of NumPy or a sequence."""

    def cast(self, x: T, dtype: str) -> T: ...

    def scalar(self, value: Any, dtype: str) -> T:
        """A scalar of the library from a Python number or an integer scalar of the library."""

    def together(self, fn: Callable[..., T], *xs: T) -> T:
        """fn(kernel, *xs): many element-wise functions of few arrays, in one pass over memory where the
        library can; `fn` is a function of a module."""

    def loop(self, n: int, step: LoopStep, carried: Sequence[T]) -> tuple[list[T], list[T]]:
        """step(i, carried) -> (carried, made) for i = 0 .. n - 1, one after the other. Returns the last
        `carried`, and each `made` stacked along a new first axis."""

    def attention(self, a: Attending) -> tuple[T, T] | None:
        """Result and log-sum-exp (see `Attending`) by a kernel of the library's own; None if it has none for
        these operands."""

    def attention_gradient(self, a: Attending, result: T, lse: T, dresult: T) -> tuple[T, T, T] | None:
        """Gradients of query, key and value by a kernel of the library's own; None if it has none."""


class WithoutLibraryKernels:
    """The functions of the protocol that a library may lack, for one that lacks all of them."""

    def lacks(self, *operands: Any, **named: Any) -> None:
        """None, whatever the operands."""

    padded_conv = attention = attention_gradient = lacks


BLOCKS = (512, 256, 128)
"""Queries and keys that attention on a TPU works on at once: the largest that divides. Larger blocks and
their gradients do not fit in the fast memory of all generations."""


@dataclass(frozen=True)
class Attending:
    """The operands of attention on one device, in one order: softmax(scale query key + bias) value.

    Shapes are [*shared, *group, queries, width] of query, [*shared, keys, width] of key and value. All others
    broadcast to the logits' [*shared, *group, queries, keys] and have as many axes. The result is
    [*shared, *group, queries, width of value], in the query's dtype; the log-sum-exp of the logits
    [*shared, *group, queries], in float32 (float64 for such a query).

    Attributes:
      query, key, value: the factors.
      shared: number of leading axes that keys and values also have.
      first: position of the first query; keys begin at 0.
      starts: value of `first` on each device, at equal distances.
      scale: of the products.
      causal: a query sees keys up to its own position.
      window: a query sees fewer than this many positions back (without `causal`: and ahead); 0: all.
      extra_logit: of a key without a value; None: no such key.
      bias: added to the logits.
      mask: bool; keys count where it holds.
      segments: of queries [.., queries, 1] and of keys [.., 1, keys]; keys count where the two are equal.
      partial: the log-sum-exp that gradients are given is of more keys than these.
      rate: of dropout on the weights.
      noise: which row of the whole tensor each is (see `ops.random.rows`), twice uint32 [.., queries, 1],
        the key of the weights' random numbers, and which of a row's keys is the first one here.
    """

    query: T
    key: T
    value: T
    shared: int
    first: Any
    starts: Sequence[int]
    scale: float
    causal: bool = False
    window: int = 0
    extra_logit: float | None = None
    bias: T | None = None
    mask: T | None = None
    segments: tuple[T, T] | None = None
    partial: bool = False
    rate: float = 0.0
    noise: tuple[T, ...] | None = None


@dataclass(frozen=True)
class PartRows:
    """Rows of the whole batch that a part of it holds: row i of part n is row n * size + i.

    Attributes:
      batch: the dimensions of the whole batch, under each name that it has.
    """

    batch: Shape
    size: int

    def __str__(self) -> str:
        return f"{self.size}*part+i of {self.batch}"


@dataclass(frozen=True)
class At:
    """The position of a device in one operation.

    Attributes:
      inputs, outputs: types of the local pieces.
      split: names of the dimensions that are split here.
      offset_of: name -> index (library scalar) of the first element of this device's piece.
      ways: name -> number of pieces, for split dimensions.
    """

    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    split: frozenset[str]
    offset_of: Callable[[str], Any]
    ways: Mapping[str, int] = field(default_factory=dict)

    def offset(self, name: str) -> Any:
        """Index of the first element of `name` on this device (0 when it is not split)."""
        return self.offset_of(name) if name in self.split else 0

    def shard(self, name: str) -> Any:
        """The number of the piece of `name` on this device (0 for the first, and when it is not split)."""
        if name not in self.split:
            return 0
        # Engines multiply the piece's number by its size, in the last operand that has the dimension.
        size = [d.size for t in (*self.inputs, *self.outputs) for d in t.shape if d.name == name][-1]
        return self.offset_of(name) // size


@dataclass(frozen=True, slots=True)
class ArrayFunction:
    """One function.

    Attributes:
      array: its name in NumPy and jax.numpy; empty: both kernels have their own.
      tensorflow: its name below `tf`; empty: that kernel has its own.
      flops: arithmetic per element (vector-math libraries' polynomial lengths where it is far from one).
      vanishes: it makes 0 of 0.
      whole: it gives whole numbers for whole numbers.
      gives_bool: its result is bool.
      flat: its derivative is 0, or there is none.
    """

    array: str = ""
    tensorflow: str = ""
    flops: float = 1
    vanishes: bool = False
    whole: bool = False
    gives_bool: bool = False
    flat: bool = False


F = ArrayFunction
UNARY: Mapping[str, ArrayFunction] = {
    "neg": F("negative", vanishes=True, whole=True),
    "abs": F("abs", vanishes=True, whole=True),
    "sign": F("sign", vanishes=True, whole=True, flat=True),
    "exp": F("exp", "exp", flops=8),
    "log": F("log", "math.log", flops=8),
    "log1p": F("log1p", "math.log1p", vanishes=True),
    "expm1": F("expm1", "math.expm1", vanishes=True),
    "sqrt": F("sqrt", "sqrt", vanishes=True),
    "rsqrt": F("", "math.rsqrt"),
    "square": F("square", vanishes=True, whole=True),
    "reciprocal": F(),
    "sin": F("sin", "sin", vanishes=True),
    "cos": F("cos", "cos"),
    "tanh": F("tanh", "tanh", flops=10, vanishes=True),
    "sigmoid": F("", "sigmoid", flops=10),
    "atan": F("arctan", "math.atan", flops=12, vanishes=True),
    "erf": F("", "math.erf", flops=12, vanishes=True),
    "erfc": F("", "math.erfc", flops=12),
    "floor": F("floor", vanishes=True, whole=True, flat=True),
    "relu": F(vanishes=True, whole=True),
    "softplus": F("", "math.softplus"),
    **dict.fromkeys(("gelu", "gelu_exact", "gelu_fast", "gelu_new"), F(flops=16)),
    "silu": F(flops=12),
    "not": F("logical_not", "logical_not", whole=True, gives_bool=True, flat=True),
    "is_finite": F("isfinite", whole=True, gives_bool=True, flat=True),
}
"""Element-wise functions of one operand, by name."""
BINARY: Mapping[str, ArrayFunction] = {
    "add": F("add", "add"),
    "sub": F("subtract", "subtract"),
    "mul": F("multiply", "multiply"),
    "div": F(),
    "max": F("maximum", "maximum"),
    "min": F("minimum", "minimum"),
    "pow": F("power", "pow", flops=12),
    "mod": F("mod", "math.floormod"),
    "floordiv": F("floor_divide", "math.floordiv"),
    "eq": F("equal", "equal", gives_bool=True),
    "ne": F("not_equal", "not_equal", gives_bool=True),
    "lt": F("less", "less", gives_bool=True),
    "le": F("less_equal", "less_equal", gives_bool=True),
    "gt": F("greater", "greater", gives_bool=True),
    "ge": F("greater_equal", "greater_equal", gives_bool=True),
    "and": F("logical_and", "logical_and", gives_bool=True),
    "or": F("logical_or", "logical_or", gives_bool=True),
    "bit_xor": F("bitwise_xor", "bitwise.bitwise_xor"),
    "bit_and": F("bitwise_and", "bitwise.bitwise_and"),
    "shift_right": F("right_shift", "bitwise.right_shift"),
}
"""Element-wise functions of two operands, by name."""
REDUCE: Mapping[str, ArrayFunction] = {
    "sum": F("sum", "reduce_sum"),
    "max": F("max", "reduce_max"),
    "min": F("min", "reduce_min"),
    "prod": F("prod", "reduce_prod"),
    "all": F("all", "reduce_all"),
    "any": F("any", "reduce_any"),
}
"""Along axes, which disappear."""

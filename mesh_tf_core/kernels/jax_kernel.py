"""The kernel protocol in JAX, which this module imports: engines import it when they are opened.

Numbers of Python stay constants of their dtype, so nothing depends on JAX's own promotion of types.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesh_tf_core.ir.dtypes import FLOAT8
from mesh_tf_core.ir.kernel import Attending, Edge, LoopStep
from mesh_tf_core.kernels.array_kernel import ArrayKernel, Functions, libraries, np_dtype, wide
from mesh_tf_core.kernels.contraction import parse
from mesh_tf_core.kernels.libraries import lacks_kernel

T = Any


def _is_float(x: T) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _like(value: float, x: T) -> T:
    return np.asarray(value).astype(x.dtype)


def _truncated(x: T, y: T) -> T:
    """Division of integers, rounded towards zero."""
    return lax.div(*jnp.broadcast_arrays(x, y))


_UNARY: Functions = {
    "rsqrt": lax.rsqrt,
    "square": lambda x: x * x,
    "reciprocal": lambda x: lax.reciprocal(x) if _is_float(x) else _truncated(jnp.ones_like(x), x),
    "sigmoid": jax.nn.sigmoid,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "floor": lambda x: jnp.floor(x) if _is_float(x) else x,
    "relu": lambda x: jnp.maximum(x, _like(0, x)),
    "softplus": lambda x: jnp.logaddexp(x, _like(0, x)),
    **dict.fromkeys(("gelu", "gelu_fast", "gelu_new"), jax.nn.gelu),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "silu": lambda x: x * jax.nn.sigmoid(x),
}
_BINARY: Functions = {"div": lambda x, y: jnp.divide(x, y) if _is_float(x) else _truncated(x, y)}
_SPATIAL = "DHW"


def _sums_alone(spec: str) -> bool:
    """Whether an operand is summed before it meets another: outside of a product nothing widens the sum."""
    terms, out = parse(spec)
    return any(sum(c in t for t in terms) == 1 and c not in out for term in terms for c in term)


def _groups(ids: T, n: int) -> tuple[T, T, T]:
    """Rows before the first of n groups, rows of each group, and whether a row is in one [rows, 1]."""
    sizes = jnp.sum(ids[:, None] == lax.iota(ids.dtype, n), 0, dtype=jnp.int32)
    return jnp.sum(ids < 0, dtype=jnp.int32), sizes, ((ids >= 0) & (ids < n))[:, None]


class JaxKernel(ArrayKernel):
    """JAX's implementation of `protocol.Kernel`, for traced and concrete arrays.

    Args:
      platform: target of the compilation: cpu, gpu or tpu.
    """

    compares = True
    xp = jnp
    of_one, of_two, joining = libraries(jnp, _UNARY, _BINARY)

    def __init__(self, platform: str = "cpu") -> None:
        self.platform = platform

    def einsum(self, spec: str, *xs: T) -> T:
        if xs[0].dtype == jnp.bool_:
            return jnp.einsum(spec, *(x.astype(jnp.int32) for x in xs)) > 0
        if xs[0].dtype.itemsize == 2 and _sums_alone(spec):
            return jnp.einsum(spec, *(x.astype(jnp.float32) for x in xs)).astype(xs[0].dtype)
        if xs[0].dtype.name in FLOAT8:
            if self.platform == "gpu":
                # bfloat16 holds the numbers of both formats; on an H100, small products of eight bits
                # were not finite.
                xs = tuple(x.astype(jnp.bfloat16) for x in xs)
            return jnp.einsum(spec, *xs, preferred_element_type=jnp.float32)
        return jnp.einsum(spec, *xs)

    def conv(self, x: T, w: T, strides: Sequence[int], dilations: Sequence[int]) -> T:
        return self.padded_conv(x, w, strides, dilations, [Edge(1, 0, n) for n in x.shape[1:-1]])

    def padded_conv(
        self, x: T, w: T, strides: Sequence[int], dilations: Sequence[int], edges: Sequence[Edge]
    ) -> T:
        space = _SPATIAL[-len(strides) :]
        return lax.conv_general_dilated(
            x,
            w,
            tuple(strides),
            [(e.before, e.after(n)) for e, n in zip(edges, x.shape[1:-1], strict=True)],
            lhs_dilation=tuple(e.apart for e in edges),
            rhs_dilation=tuple(dilations),
            dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
        )

    def cumsum(self, x: T, axis: int, exclusive: bool, reverse: bool) -> T:
        axis, x_ = axis % x.ndim, wide(x)
        if exclusive:
            # One place further, instead of what would be infinity less infinity.
            low, high = (-1, 1) if reverse else (1, -1)
            ends = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
            x_ = lax.pad(x_, _like(0, x_), ends)
        return lax.cumsum(x_, axis, reverse=reverse).astype(x.dtype)

    def argmax(self, x: T, axis: int) -> T:
        x = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        return lax.argmax(x, axis % x.ndim, jnp.int32)

    def top_k(self, x: T, n: int) -> tuple[T, T]:
        # JAX puts -0.0 before 0.0; they are equal.
        values, positions = lax.top_k(jnp.where(x == 0, _like(0, x), x), n)
        return values, positions.astype(jnp.int32)

    def slice(self, x: T, begin: Sequence[Any], sizes: Sequence[int]) -> T:
        if tuple(x.shape) == tuple(sizes):
            return x
        if any(isinstance(b, jax.Array) for b in begin):
            return lax.dynamic_slice(x, [jnp.asarray(b, jnp.int32) for b in begin], tuple(sizes))
        first = [int(b) for b in begin]
        return lax.slice(x, first, [b + n for b, n in zip(first, sizes, strict=True)])

    def put(self, x: T, piece: T, axis: int, place: Any) -> T:
        return lax.dynamic_update_index_in_dim(x, piece, jnp.asarray(place, jnp.int32), axis)

    def add_at(self, x: T, values: T, ids: T, axis: int) -> T:
        # A comparison becomes part of the kernel that makes x; a scatter does not.
        here = jnp.expand_dims(ids, axis) == lax.broadcasted_iota(ids.dtype, x.shape, axis)
        return x + jnp.where(here, jnp.expand_dims(values, axis), _like(0, x))

    def pad(self, x: T, paddings: Sequence[tuple[int, int]], value: float = 0.0) -> T:
        return lax.pad(x, _like(value, x), [(before, after, 0) for before, after in paddings])

    def take(self, table: T, ids: T) -> T:
        return jnp.asarray(table).at[ids].get(mode="promise_in_bounds")

    def segment_sum(self, x: T, ids: T, n: int, most: bool = False) -> T:
        flat = jnp.reshape(ids, (-1,))
        rows = jnp.reshape(x, (flat.size, *x.shape[ids.ndim :]))
        sums = jnp.float32 if x.dtype.itemsize == 2 else x.dtype
        out = jnp.full((n, *rows.shape[1:]), -jnp.inf if most else 0, sums)
        # A negative index would count from the end; one past the end is dropped.
        place = jnp.where(flat < 0, _like(n, flat), flat)
        put = out.at[place].max if most else out.at[place].add
        return put(rows.astype(sums), mode="drop").astype(x.dtype)

    def grouped(self, x: T, w: T, ids: T, groups: int) -> T:
        begin, sizes, inside = _groups(ids, w.shape[0])
        alone = w.shape[0] == groups
        # XLA counts groups from the first row on.
        rows = x if alone else jnp.roll(x, -begin, 0)
        if (tiling := self._tiles(x, w.shape[2])) is None:
            made = lax.ragged_dot(rows, w, sizes)
        else:
            from mesh_tf_core.kernels import jax_experts

            made = jax_experts.product(rows, w, sizes, tiling)
        return jnp.where(inside, made if alone else jnp.roll(made, begin, 0), _like(0, x))

    def grouped_outer(self, x: T, y: T, ids: T, n: int, groups: int) -> T:
        begin, sizes, inside = _groups(ids, n)
        x = jnp.where(inside, x, _like(0, x))
        if n != groups:
            x, y = jnp.roll(x, -begin, 0), jnp.roll(y, -begin, 0)
        if (tiling := self._tiles(x, y.shape[1])) is None:
            rows = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
            return lax.ragged_dot_general(x, y, sizes, rows)
        from mesh_tf_core.kernels import jax_experts

        return jax_experts.outer(x, y, sizes, tiling)

    def _tiles(self, x: T, made: int) -> tuple[int, ...] | None:
        """The tiles of a library's kernel for experts, if there is one here."""
        if self.platform != "tpu":
            return None
        from mesh_tf_core.kernels import jax_experts

        return jax_experts.tiles(x.dtype, *x.shape, made)

    def iota(self, n: int, dtype: str) -> T:
        return lax.iota(np_dtype(dtype), n)

    def cast(self, x: T, dtype: str) -> T:
        x = jnp.asarray(x)
        if dtype == "bool":
            return x if x.dtype == jnp.bool_ else x != _like(0, x)
        return x.astype(np_dtype(dtype))

    def scalar(self, value: Any, dtype: str) -> T:
        if isinstance(value, jax.Array):
            return self.cast(value, dtype)
        return super().scalar(value, dtype)

    def loop(self, n: int, step: LoopStep, carried: Sequence[T]) -> tuple[list[T], list[T]]:
        return lax.scan(lambda state, i: step(i, state), list(carried), jnp.arange(n, dtype=jnp.int32))

    def attention(self, a: Attending) -> tuple[T, T] | None:
        if self._by_blocks(a):
            return None
        from mesh_tf_core.kernels import jax_attention as libraries

        return libraries.on_tpu(a) if self.platform == "tpu" else libraries.on_gpu(a)

    def attention_gradient(self, a: Attending, result: T, lse: T, dresult: T) -> tuple[T, T, T] | None:
        if self._by_blocks(a):
            return None
        from mesh_tf_core.kernels import jax_attention as libraries

        on = libraries.gradient_on_tpu if self.platform == "tpu" else libraries.gradient_on_gpu
        return on(a, result, lse, dresult)

    def _by_blocks(self, a: Attending) -> bool:
        """Whether attention has no library's kernel here."""
        return self.platform not in ("tpu", "gpu") or bool(lacks_kernel(a, self.platform))

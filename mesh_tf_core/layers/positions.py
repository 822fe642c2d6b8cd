"""Positions: sinusoids added to the input; inside attention relative biases in buckets, and rotations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mesh_tf_core.decoding.cache import Cache
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.caching import one_of_all
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.index import gather, mtf_range
from mesh_tf_core.ops.math import abs, cos, exp, log, maximum, minimum, sin
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.shape import concat, slice_dim


@dataclass(frozen=True)
class Sinusoids:
    """Sines, then cosines, of the position in wavelengths that grow geometrically from 2 pi to 2 pi base,
    added to x (Vaswani et al. 2017, section 3.5, with the features in the order of tensor2tensor's).

    Attributes:
      length, d_model: names of x's positions and of its features; the number of features is even.
      first: the number of x's first position.
    """

    base: float = 10000.0
    length: str = "length"
    d_model: str = "d_model"
    first: int = 0

    def __call__(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Same dimensions as x.

        Args:
          cache: of a text that grows (see `decoding`); at a position, x is [others, d_model].
        """
        g, d = x.graph, x.dim(self.d_model)
        half = d.size // 2
        if d.size % 2 or half < 2:
            raise UserError(
                f"Sinusoids: the size of {d.name!r} must be even and at least 4 (half sines, half cosines), "
                f"found {d.size}"
            )
        feature = mtf_range(g, d)
        cosine = feature >= half
        wave = (feature - cosine.cast("int32") * half).cast("float32")
        rate = exp(wave * (-math.log(self.base) / (half - 1)))
        positions = cache.position if one_of_all(cache) else mtf_range(g, x.dim(self.length))
        positions = positions + self.first if self.first else positions
        angle = positions.cast("float32") * rate
        return x + where(cosine, cos(angle), sin(angle)).cast(x.dtype)


@dataclass(frozen=True)
class RelativeBias:
    """A learned number per head and bucket of relative positions, added to attention's logits.

    Half of the buckets hold one distance each, the others grow with the logarithm of the distance up to
    `max_distance`; all larger ones share the last (Raffel et al. 2020, "T5", section 2.1; Mesh-TensorFlow's
    relative_position bias).

    Attributes:
      bidirectional: half of the buckets for keys after the query; else those count as distance 0.
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    name: str = "relative_bias"

    def __post_init__(self) -> None:
        own = self.buckets // 2 if self.bidirectional else self.buckets
        if own < 2 or (self.bidirectional and self.buckets % 2):
            raise UserError(
                f"RelativeBias: buckets={self.buckets} must be even and at least 4 if bidirectional, "
                "else at least 2"
            )
        if self.max_distance <= own // 2:
            raise UserError(
                f"RelativeBias: max_distance={self.max_distance} must be more than {own // 2}, the "
                "number of distances that have a bucket each; increase max_distance or use fewer buckets"
            )

    def __call__(self, relative: Tensor, heads: Sequence[Dim], dtype: str = "float32") -> Tensor:
        """relative (key minus query position) int32 [query, key] -> bias [query, key, heads]."""
        with relative.graph.scope(self.name):
            count = Dim("buckets", self.buckets)
            table = relative.graph.variable("weight", [count, *heads], Normal(0.1), activation_dtype=dtype)
            return gather(table, self.bucket(relative), count)

    def bucket(self, relative: Tensor) -> Tensor:
        """int32 bucket of every relative position."""
        own = self.buckets // 2 if self.bidirectional else self.buckets
        if self.bidirectional:
            after: Tensor | int = (relative > 0).cast("int32") * own
            distance = abs(relative)
        else:
            after = 0
            distance = maximum(-relative, 0)
        exact = own // 2
        ratio = log(maximum(distance, exact).cast("float32") * (1.0 / exact))
        # The small term keeps exact powers in the bucket that they begin, however the logarithm is rounded.
        grown = ratio * ((own - exact) / math.log(self.max_distance / exact)) + 1e-4
        far = minimum(grown.cast("int32") + exact, own - 1)
        return where(distance < exact, distance, far) + after


@dataclass(frozen=True)
class Rotary:
    """Rotates pairs of elements, half of d_kv apart, by angles proportional to the position, so that products
    of queries and keys depend only on relative positions (Su et al. 2021, "RoFormer", section 3.2).

    Attributes:
      base: the slowest pair turns by 1 / base per position.
      turned: elements that are rotated, the first ones; 0: all.
    """

    base: float = 10000.0
    turned: int = field(default=0, kw_only=True)

    def __call__(self, x: Tensor, length: str, d_kv: str, position: Tensor | None = None) -> Tensor:
        """x [others, length, d_kv], rotated; d_kv has an even size.

        Args:
          position: int32 scalar, the position of all of x, which then has no dimension `length`.
        """
        g, k = x.graph, x.dim(d_kv)
        if 0 < self.turned < k.size:
            some = replace(self, turned=0)(slice_dim(x, k, 0, self.turned), length, d_kv, position)
            return concat([some, slice_dim(x, k, self.turned, k.size - self.turned)], k)
        if k.size % 2:
            raise UserError(
                f"Rotary: the size of {k.name!r} must be even, because pairs of elements are rotated; found "
                f"{k.size}"
            )
        half = k.size // 2
        place = mtf_range(g, k)
        second = place >= half
        pair = (place - second.cast("int32") * half).cast("float32")
        positions = mtf_range(g, x.dim(length)) if position is None else position
        angle = positions.cast("float32") * self.rates(pair, half)
        # Both halves change places: where d_kv is split, neighbours exchange them.
        other = shift(x, half, k, wrap=True)
        sign = second.cast("float32") * 2.0 - 1.0
        return x * cos(angle).cast(x.dtype) + other * (sin(angle) * sign).cast(x.dtype)

    def rates(self, pair: Tensor, half: int) -> Tensor:
        """By how much the pairs of these numbers, of `half`, turn per position."""
        return exp(pair * (-math.log(self.base) / half))

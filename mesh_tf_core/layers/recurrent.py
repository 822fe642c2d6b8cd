"""Layers with a state per head instead of keys and values, computed in chunks: matrix products in a chunk,
as in attention, and one state between chunks, so that work grows with the length and not its square.

  Mamba-2 (Dao & Gu 2024, "Transformers are SSMs", sections 6 and 7)
      h = e^(dt a) h + dt x b'              y = h c + D x
  lightning attention (MiniMax 2025, "MiniMax-01", section 2.2)
      h = e^-s h + v k'                     y = h q
  gated delta rule (Yang et al. 2024, "Gated Delta Networks"; Kimi Team 2025, "Kimi Linear")
      h = e^g h (1 - w k k') + w v k'       y = h q

The first two have a scalar decay, so states between chunks are one product with a matrix of decays. The delta
rule subtracts what a state predicts already: a triangular system within a chunk, and a loop over chunks. In
Kimi Linear every channel of a key has a decay g of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ONES, ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import activation, project
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.conv import conv
from mesh_tf_core.ops.cumulative import cumsum
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.index import mtf_range
from mesh_tf_core.ops.math import (
    exp,
    floordiv,
    logical_and,
    maximum,
    mod,
    rsqrt,
    sigmoid,
    silu,
    softplus,
    square,
)
from mesh_tf_core.ops.reduce import reduce_mean, reduce_sum
from mesh_tf_core.ops.shape import rename, reshape, transpose
from mesh_tf_core.tracing.scan import scan

NEVER = -1e9
"""The logarithm of a factor that is 0."""


def unit_rms(x: Tensor, dims: Sequence[Dim | str], epsilon: float) -> Tensor:
    """x with root mean square 1 over several dimensions together."""
    return x * rsqrt(reduce_mean(square(x), list(dims)) + epsilon)


def short_conv(
    x: Tensor, name: str, taps: int, bias: bool, length: str = "length", activated: bool = True
) -> Tensor:
    """silu of every channel's own convolution over its last `taps` positions, or the convolution itself."""
    with x.graph.scope(name):
        dims = list(x.shape.without(length).dims[1:])
        tap = Dim("tap", taps)
        w = x.graph.variable("weight", [tap, *dims], Normal(taps**-0.5), activation_dtype=x.dtype)
        y = conv(x, w, [x.dim(length)], [tap], None, pads=[(taps - 1, 0)], groups=dims)
        y = y + x.graph.variable("bias", dims, ZEROS, activation_dtype=x.dtype) if bias else y
        return silu(y) if activated else y


@dataclass(frozen=True)
class Chunks:
    """A text in chunks of at most `size` positions.

    Attributes:
      chunks, place: the numbers of the chunk, and of the position in it.
    """

    chunks: Dim
    place: Dim
    length: Dim

    @classmethod
    def of(cls, length: Dim, size: int) -> Chunks:
        """UserError unless chunks divide the text."""
        size = min(size, length.size)
        if size < 1 or length.size % size:
            raise UserError(f"chunk={size} does not divide {length.name}={length.size}; give a divisor")
        return cls(Dim("chunks", length.size // size), Dim("place", size), length)

    def cut(self, t: Tensor) -> Tensor:
        """[others, length, more] -> [others, chunks, place, more]."""
        at = t.shape.index(self.length.name)
        return reshape(t, [*t.shape.dims[:at], self.chunks, self.place, *t.shape.dims[at + 1 :]])

    def joined(self, t: Tensor) -> Tensor:
        """The inverse of `cut`."""
        at = t.shape.index("chunks")
        return reshape(t, [*t.shape.dims[:at], self.length, *t.shape.dims[at + 2 :]])

    def between(self, total: Tensor, first: Tensor, dim: Dim, strict: bool = False) -> Tensor:
        """exp(total - first) of pairs of an element and an earlier one of `dim` (`strict`: not itself)."""
        before = f"{dim.name}_from"
        to, start = mtf_range(total.graph, dim), mtf_range(total.graph, Dim(before, dim.size))
        seen = to > start if strict else to >= start
        return exp(where(seen, total - rename(first, **{dim.name: before}), NEVER))


def scanned(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """y_t = h_t c_t, with h_t = exp(decay_t) h_(t-1) + x_t b_t, from h = 0 on.

    Args:
      x: [batch, length, heads, d_head], with any number of dimensions of heads.
      decay: float32 [batch, length, heads], negative.
      b, c: [batch, length, d_state], and any of the heads' dimensions.
    """
    cut = Chunks.of(x.dim("length"), chunk)
    values, cb, cc, chunks, place = cut.cut(x), cut.cut(b), cut.cut(c), cut.chunks, cut.place
    before = Dim("place_from", place.size)
    parts = cut.cut(decay)
    total = cumsum(parts, place)  # the logarithm of what is left of the chunk's first state
    kept = cut.between(total, total, place).cast(x.dtype)
    state = b.dim("d_state")
    pairs = [d for d in cc.shape if d != state]
    seen = einsum([cc, rename(cb, place="place_from")], [*pairs, before])
    y = einsum([seen * kept, rename(values, place="place_from")], values.shape)
    if chunks.size == 1:
        return cut.joined(y)
    whole = reduce_sum(parts, place)
    left = exp(whole - total).cast(x.dtype)
    states = einsum([cb, values * left], [*values.shape.without("place"), state])
    done = cumsum(whole, chunks)
    passed = cut.between(done - whole, done, chunks, strict=True).cast(x.dtype)
    carried = einsum([passed, rename(states, chunks="chunks_from")], states.shape)
    return cut.joined(y + einsum([cc, carried], values.shape) * exp(total).cast(x.dtype))


def log_a(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Decays of different heads."""
    return np.log(rng.uniform(1, 16, shape))


def dt_bias(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """So that softplus gives steps between 0.001 and 0.1."""
    dt = np.exp(rng.uniform(math.log(0.001), math.log(0.1), shape))
    return dt + np.log(-np.expm1(-dt))


@dataclass(frozen=True)
class Mamba2:
    """Selective state spaces of Mamba-2.

    Attributes:
      heads, d_head, d_state: of the states.
      groups: of heads that share b and c; in more than one, heads are [groups, heads / groups].
      taps, chunk: positions of the short convolution, and of a chunk.
      bias, conv_bias: of the projections, and of the convolution.
      norm: of the output, by group: "gated" after the gate, "first" before it, or "" none.
      least: the smallest step dt.
      times: factors of the gate, x, b, c and dt, as they are projected.
    """

    heads: Dim
    d_head: Dim
    d_state: Dim
    groups: int = 1
    taps: int = 4
    chunk: int = 256
    bias: bool = False
    conv_bias: bool = True
    norm: str = "gated"
    epsilon: float = 1e-5
    least: float = 0.0
    times: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    d_model: str = "d_model"
    name: str = "mamba"

    def __call__(self, u: Tensor) -> Tensor:
        """[batch, length, d_model] -> the same."""
        g, d = u.graph, u.dim(self.d_model)
        if self.heads.size % self.groups:
            raise UserError(f"Mamba2: groups={self.groups} must divide heads={self.heads.size}")
        many = (Dim("ssm_groups", self.groups),) if self.groups > 1 else ()
        heads = (*many, Dim(self.heads.name, self.heads.size // self.groups))
        inner = (*heads, self.d_head)

        def made(name: str, dims: Sequence[Dim], number: int, convolved: bool = True) -> Tensor:
            y = project(u, name, [d], dims, self.bias)
            y = y if self.times[number] == 1 else y * self.times[number]
            return short_conv(y, f"{name}_conv", self.taps, self.conv_bias) if convolved else y

        with g.scope(self.name):
            gate = made("gate", inner, 0, convolved=False)
            values = made("x", inner, 1)
            b, c = made("b", (*many, self.d_state), 2), made("c", (*many, self.d_state), 3)
            dt = made("dt", heads, 4, convolved=False).cast("float32")
            dt = softplus(dt + g.variable("step_bias", heads, dt_bias))
            dt = maximum(dt, self.least) if self.least else dt
            decay = dt * -exp(g.variable("log_a", heads, log_a))
            y = scanned(values * dt.cast(u.dtype), decay, b, c, self.chunk)
            y = y + values * g.variable("skip", heads, ONES, activation_dtype=u.dtype)
            return project(self._gated(y, silu(gate), heads), "out", inner, [d], self.bias)

    def _gated(self, y: Tensor, gate: Tensor, heads: Sequence[Dim]) -> Tensor:
        if not self.norm:
            return y * gate
        y = y * gate if self.norm == "gated" else y
        scale = y.graph.variable("out_norm", [*heads, self.d_head], ONES, activation_dtype=y.dtype)
        y = unit_rms(y, [heads[-1], self.d_head], self.epsilon) * scale
        return y if self.norm == "gated" else y * gate


@dataclass(frozen=True)
class LightningAttention:
    """Attention without a softmax, whose weights decay by a fixed rate per head and layer.

    Attributes:
      heads, d_kv: of queries, keys and values.
      layers: number of layers of the model; deeper ones decay more slowly.
    """

    heads: Dim
    d_kv: Dim
    layers: int
    chunk: int = 256
    activation: str = "silu"
    epsilon: float = 1e-6
    d_model: str = "d_model"
    name: str = "attention"

    def __call__(self, x: Tensor, depth: Tensor) -> Tensor:
        """[batch, length, d_model] -> the same; depth: the layer's number, int32."""
        g, d, act = x.graph, x.dim(self.d_model), activation(self.activation)
        with g.scope(self.name):
            q, k, v = (act(project(x, n, [d], [self.heads, self.d_kv])) for n in "qkv")
            place = mtf_range(g, self.heads).cast("float32") + 1.0
            deep = 1.0 - depth.cast("float32") * (1 / (self.layers - 1 + 1e-5)) + 1e-5
            rate = exp(place * (-8 / self.heads.size * math.log(2))) * deep
            decay = broadcast(-rate, [*x.shape.without(self.d_model), self.heads])
            y = scanned(v, decay, _state(k, self.d_kv), _state(q, self.d_kv), self.chunk)
            scale = g.variable("out_norm", [self.heads, self.d_kv], ONES, activation_dtype=x.dtype)
            y = unit_rms(y, [self.heads, self.d_kv], self.epsilon) * scale
            y = y * sigmoid(project(x, "gate", [d], [self.heads, self.d_kv]))
            return project(y, "o", [self.heads, self.d_kv], [d])


def _state(x: Tensor, dim: Dim) -> Tensor:
    return rename(x, **{dim.name: "d_state"})


@dataclass(frozen=True)
class GatedDeltaNet:
    """The gated delta rule, with a convolution before it and a gate behind it (Qwen3-Next, Kimi Linear).

    Attributes:
      heads: of values, in groups that share a query and a key; key_heads: number of these.
      d_k, d_v: elements of a key, and of a value.
      channels: every channel of a key has a decay of its own; least: the bound of its logarithm, which is
        then a sigmoid; 0: none.
      rank: of the maps to decays and gates; 0: they are whole. gate: the activation of the gate.
    """

    heads: Dim
    key_heads: int
    d_k: Dim
    d_v: Dim
    taps: int = 4
    chunk: int = 64
    epsilon: float = 1e-6
    channels: bool = False
    least: float = 0.0
    rank: int = 0
    gate: str = "silu"
    d_model: str = "d_model"
    name: str = "delta"

    def __call__(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> the same."""
        g, d = x.graph, x.dim(self.d_model)
        if self.heads.size % self.key_heads:
            raise UserError(f"GatedDeltaNet: key_heads={self.key_heads} must divide heads={self.heads.size}")
        keys = Dim(self.heads.name, self.key_heads)
        shared = self.heads.size // self.key_heads
        values = (keys, Dim("group", shared)) if shared > 1 else (keys,)
        decays = [*values, self.d_k] if self.channels else values
        with g.scope(self.name):

            def made(name: str, dims: Sequence[Dim]) -> Tensor:
                y = short_conv(project(x, name, [d], dims), f"{name}_conv", self.taps, False)
                return y.cast("float32")

            def low(name: str, dims: Sequence[Dim]) -> Tensor:
                if not self.rank:
                    return project(x, name, [d], dims)
                rank = Dim(f"{name}_rank", self.rank)
                return project(project(x, f"{name}_down", [d], [rank]), name, [rank], dims)

            q, k = (unit_rms(made(n, [keys, self.d_k]), [self.d_k], 1e-6 / self.d_k.size) for n in "qk")
            v = made("v", [*values, self.d_v])
            gate = low("gate", [*values, self.d_v])
            write = sigmoid(project(x, "beta", [d], values)).cast("float32")
            dt = low("dt", decays).cast("float32") + g.variable("dt_bias", decays, dt_bias)
            rate = exp(g.variable("log_a", values, log_a))
            decay = sigmoid(dt * rate) * self.least if self.least else softplus(dt) * -rate
            root = self.d_k.size**-0.5  # unit_rms has length sqrt(d_k)
            y = delta_rule(q * root**2, k * root, v, decay, write, self.chunk).cast(x.dtype)
            scale = g.variable("out_norm", [self.d_v], ONES, activation_dtype=x.dtype)
            y = unit_rms(y, [self.d_v], self.epsilon) * scale * activation(self.gate)(gate)
            return project(y, "out", [*values, self.d_v], [d])


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor, chunk: int) -> Tensor:
    """y_t = h_t' q_t, with h_t = e^(decay_t) h_(t-1) + write_t k_t (v_t - k_t' e^(decay_t) h_(t-1))'.

    Args:
      q, k: [batch, length, heads, d_k]; v: [batch, length, heads, group, d_v].
      decay, write: float32 [batch, length, heads, group]; decay also with d_k, if channels differ.
    """
    cut = Chunks.of(v.dim("length"), chunk)
    q, k, v, decay, write = (cut.cut(t) for t in (q, k, v, decay, write))
    place = cut.place
    d_k = k.shape.dims[-1]
    rows = list(write.shape.dims)
    total = cumsum(decay, place)
    earlier = rename(k, place="place_from")
    before = earlier.dim("place_from")
    if d_k in decay.shape:
        alike, asking = (_decayed(t, earlier, decay, [*rows, before]) for t in (k, q))
    else:
        kept, pairs = cut.between(total, total, place), [*k.shape.without(d_k.name), before]
        alike, asking = (einsum([t, earlier], pairs) * kept for t in (k, q))
    solve = _inverse(alike * write, place, before)
    new = einsum([solve, rename(v * write, place="place_from")], v.shape)
    decayed = einsum([k, write * exp(total)], [*rows, d_k])
    read = einsum([solve, rename(decayed, place="place_from")], [*rows, d_k])
    asked = einsum([q, exp(total)], [*rows, d_k])
    whole = reduce_sum(decay, place)
    stored = einsum([k, exp(whole - total)], [*rows, d_k])

    def step(state: Tensor, *parts: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        new, read, inside, asked, stored, left = parts
        fresh = new - einsum([read, state], new.shape)
        y = einsum([asked, state], new.shape) + einsum([inside, rename(fresh, place="place_from")], new.shape)
        return state * left + einsum([stored, fresh], state.shape), (y,)

    shape = [*(d for d in rows if d not in (cut.chunks, place)), d_k, v.shape.dims[-1]]
    begin = broadcast(constant_like(v, 0.0), shape)
    _, (y,) = scan(step, begin, cut.chunks, (new, read, asking, asked, stored, exp(whole)))
    return cut.joined(transpose(y, new.shape))


def _decayed(x: Tensor, y: Tensor, decay: Tensor, pairs: Sequence[Dim]) -> Tensor:
    """sum over channels of x_i y_j e^(the decays after j up to i), of positions i and earlier ones j or i
    itself. Of two blocks next to each other, both factors are measured from the border, so that none is above
    1: blocks of 1, 2, 4, ... positions."""
    place, before = x.dim("place"), y.dim("place_from")
    to, start = mtf_range(x.graph, place), mtf_range(x.graph, before)
    found = where(to.equal(start), einsum([x, y], [*x.shape.dims[:-1], before]), 0.0)
    moved = rename(decay, place="place_from")
    size = 1
    while size < place.size:
        near = floordiv(to, size).equal(floordiv(start, size))
        since, until = (logical_and(near, seen).cast("float32") for seen in (start <= to, start < to))
        x_left = x * exp(einsum([since, moved], decay.shape))
        y_left = y * exp(einsum([until, decay], moved.shape))
        found, size = where(_corner(to, start, size), einsum([x_left, y_left], pairs), found), 2 * size
    return found


def _corner(to: Tensor, start: Tensor, size: int) -> Tensor:
    """True for rows of the second of two blocks of so many, and columns of the first."""
    (to_two, odd), (start_two, even) = (
        (floordiv(t, 2 * size), mod(floordiv(t, size), 2)) for t in (to, start)
    )
    return logical_and(to_two.equal(start_two), odd > even)


def _inverse(x: Tensor, rows: Dim, columns: Dim) -> Tensor:
    """The inverse of a triangular matrix with ones on its diagonal and x below: blocks of 1, 2, 4, ... rows,
    two of which give the inverse of one twice as large, as ((a, 0), (b, c)) has ((a', 0), (-c' b a', c'))."""
    to, start = mtf_range(x.graph, rows), mtf_range(x.graph, columns)
    found = to.equal(start).cast(x.dtype)
    size = 1
    while size < rows.size:
        corner = where(_corner(to, start, size), x, 0.0)
        if size > 1:
            corner = _product(_product(found, corner, rows, columns), found, rows, columns)
        found, size = found - corner, 2 * size
    return found


def _product(x: Tensor, y: Tensor, rows: Dim, columns: Dim) -> Tensor:
    """Of two matrices [others, rows, columns] of equal sides."""
    every = dict.fromkeys([*x.shape, *y.shape])
    return einsum([rename(x, **{columns.name: "inner"}), rename(y, **{rows.name: "inner"})], list(every))

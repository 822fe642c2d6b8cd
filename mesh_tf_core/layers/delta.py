"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"; Kimi Team 2025, "Kimi Linear"):

      h = e^g h (1 - w k k') + w v k'       y = h q

It subtracts what a state predicts already: a triangular system within a chunk, and a loop over chunks. In
Kimi Linear every channel of a key has a decay g of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ONES
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import activation, project
from mesh_tf_core.layers.recurrent import Chunks, Recurrence, dt_bias, log_a, made_by, short_conv, unit_rms
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.cumulative import cumsum
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.index import mtf_range
from mesh_tf_core.ops.math import exp, floordiv, logical_and, mod, sigmoid, silu, softplus
from mesh_tf_core.ops.reduce import reduce_sum
from mesh_tf_core.ops.shape import rename, transpose
from mesh_tf_core.tracing.scan import scan


@dataclass(frozen=True)
class GatedDeltaNet(Recurrence):
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
                y = project(x, name, [d], dims)
                with self.again(g):
                    y = short_conv(y, f"{name}_conv", self.taps, False)
                return silu(y)

            def low(name: str, dims: Sequence[Dim]) -> Tensor:
                if not self.rank:
                    return project(x, name, [d], dims)
                rank = Dim(f"{name}_rank", self.rank)
                return project(project(x, f"{name}_down", [d], [rank]), name, [rank], dims)

            q, k = (made(n, [keys, self.d_k]) for n in "qk")
            v = made("v", [*values, self.d_v])
            gate = low("gate", [*values, self.d_v])
            write = sigmoid(project(x, "beta", [d], values)).cast("float32")
            dt = low("dt", decays).cast("float32") + g.variable("dt_bias", decays, dt_bias)
            rate = exp(g.variable("log_a", values, log_a))
            decay = sigmoid(dt * rate) * self.least if self.least else softplus(dt) * -rate

            def rule(q: Tensor, k: Tensor, v: Tensor, *others: Tensor, chunk: int) -> Tensor:
                root = self.d_k.size**-0.5  # unit_rms has length sqrt(d_k)
                q, k = (unit_rms(t.cast("float32"), [self.d_k], 1e-6 * root**2) for t in (q, k))
                return delta_rule(q * root**2, k * root, v.cast("float32"), *others, chunk=chunk).cast(
                    v.dtype
                )

            work = "decaying" if self.channels else "delta", self.d_k.size, self.d_v, shared
            y = made_by(self, rule, work, q, k, v, decay, write)
            scale = g.variable("out_norm", [self.d_v], ONES, activation_dtype=x.dtype)
            with self.again(g):
                y, gate = unit_rms(y, [self.d_v], self.epsilon) * scale, activation(self.gate)(gate)
            return project(y * gate, "out", [*values, self.d_v], [d])


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor, *, chunk: int) -> Tensor:
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

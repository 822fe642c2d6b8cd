"""Layers with a state per head instead of keys and values, computed in chunks: matrix products in a chunk,
as in attention, and one state between chunks, so that work grows with the length and not its square.

  Mamba-2 (Dao & Gu 2024, "Transformers are SSMs", sections 6 and 7)
      h = e^(dt a) h + dt x b'              y = h c + D x
  lightning attention (MiniMax 2025, "MiniMax-01", section 2.2)
      h = e^-s h + v k'                     y = h q

Both have a scalar decay, so states between chunks are one product with a matrix of decays (`delta` has the
rule that needs a loop over chunks). In Mamba (Gu & Dao 2023, "Mamba", algorithm 2), the same as Mamba-2
element by element, every channel decays at rates of its own, so that no chunk is a matrix product.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ONES, ZEROS, Normal
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Builder, Inside, Tensor
from mesh_tf_core.layers.base import activation, project
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.conv import conv
from mesh_tf_core.ops.cumulative import cumsum
from mesh_tf_core.ops.custom import LibraryKernels, custom_gradient
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.index import mtf_range
from mesh_tf_core.ops.math import exp, maximum, rsqrt, sigmoid, silu, softplus, square
from mesh_tf_core.ops.reduce import reduce_mean, reduce_sum
from mesh_tf_core.ops.shape import rename, reshape, transpose
from mesh_tf_core.tracing.gradients import gradients_inside
from mesh_tf_core.tracing.graph import graph_of
from mesh_tf_core.tracing.scan import scan

NEVER = -1e9
"""The logarithm of a factor that is 0."""
KERNEL = "chunk_kernel"
"""The scope of operations that libraries have one kernel for (fla-org/flash-linear-attention, fla/ops;
state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py)."""
AGAIN = "made again"
"""The end of the names of calls (`Scopes.in_call`) whose results backward makes again, and does not keep."""


def unit_rms(x: Tensor, dims: Sequence[Dim | str], epsilon: float) -> Tensor:
    """x with root mean square 1 over several dimensions together."""
    return x * rsqrt(reduce_mean(square(x), list(dims)) + epsilon)


def short_conv(x: Tensor, name: str, taps: int, bias: bool, length: str = "length") -> Tensor:
    """Every channel's own convolution over its last `taps` positions."""
    with x.graph.scope(name):
        dims = list(x.shape.without(length).dims[1:])
        tap = Dim("tap", taps)
        w = x.graph.variable("weight", [tap, *dims], Normal(taps**-0.5), activation_dtype=x.dtype)
        y = conv(x, w, [x.dim(length)], [tap], None, pads=[(taps - 1, 0)], groups=dims)
        return y + x.graph.variable("bias", dims, ZEROS, activation_dtype=x.dtype) if bias else y


@dataclass(frozen=True)
class Recurrence:
    """The base of layers with states.

    Attributes:
      fused: as libraries' kernels, backward keeps the inputs of the recurrence alone, and where programs call
        libraries, nothing inside is in memory (`KERNEL`).
    """

    fused: bool = field(default=False, kw_only=True)

    def again(self, graph: Builder, really: bool = True) -> Inside:
        """For what libraries compute beside the recurrence, and make `again` in backward."""
        return graph.in_call(graph.path(AGAIN) if self.fused and really else "")


KERNELS = json.loads((Path(__file__).parent / "chunk_kernels.json").read_text(encoding="utf-8"))


def kernels(rule: str, phase: str, k: int, v: int, chunk: int, shared: int) -> list[tuple[float, ...]]:
    """Elements that each kernel moves, FLOPs of products, 1 if it walks by chunks, FLOPs of vector units."""
    own, pairs = k / shared, chunk / shared
    sizes = dict(zip("kvcsopg", (k, v, chunk, k * v / chunk, own, pairs, shared > 1), strict=True))

    def total(text: str) -> float:
        terms = re.findall(r"([\d.]*)([a-z]+)", text)
        return sum(float(times or 1) * math.prod(map(sizes.__getitem__, letters)) for times, letters in terms)

    rows = (f"{row};;;".split(";")[:4] for row in KERNELS[rule][phase])
    return [(total(moved), total(flops), "walks" in walks, total(own)) for moved, flops, walks, own in rows]


def made_by(layer: Any, rule: Callable[..., Tensor], work: tuple[str, int, Dim, int], *xs: Tensor) -> Any:
    """The result of a layer's recurrence, in chunks; `work`: a library's kernels in `KERNELS`, elements of a
    key, the dimension of a value, and heads that share a key."""
    if not layer.fused:
        return rule(*xs, chunk=layer.chunk)
    graph, forward = graph_of(xs[0]), partial(rule, chunk=layer.chunk)
    chunks = -(-xs[0].dim("length").size // layer.chunk)

    def counted(y: Tensor, phase: str) -> Any:
        name, k, dim, shared = work
        n, found = dim.size, kernels(name, phase, k, dim.size, layer.chunk, shared)
        each = tuple((2 * b / n, own / n, chunks * int(walks), more / n) for b, own, walks, more in found)
        return graph.apply(LibraryKernels(each), y)

    with graph.scope(KERNEL):
        return counted(remade(forward, xs, partial(counted, phase="backward")), "forward")


def remade(forward: Callable[..., Any], xs: Sequence[Tensor], seen: Callable[[Tensor], Tensor]) -> Any:
    """forward(*xs), a tensor or a tuple of them, of which backward keeps the inputs alone and begins with
    seen(gradient) of each."""

    def backward(dys: list[Tensor | None], xs: list[Tensor], _: list[Tensor]) -> list[Tensor | None]:
        graph = graph_of(xs[0])
        given = [graph.visible(x) for x in xs]
        asked = [dy if dy is None else seen(dy) for dy in dys]
        with graph.phase(Phase.RECOMPUTE):
            again = forward(*given)
        return gradients_inside(again if isinstance(again, tuple) else [again], asked, given)

    return custom_gradient(forward, backward, xs)


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


def scanned(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, *, chunk: int) -> Tensor:
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
class Mamba2(Recurrence):
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
            with self.again(g):
                return silu(short_conv(y, f"{name}_conv", self.taps, self.conv_bias)) if convolved else y

        def rule(x: Tensor, dt: Tensor, skip: Tensor, *others: Tensor, chunk: int) -> Tensor:
            return scanned(x * dt.cast(x.dtype), *others, chunk=chunk) + x * skip

        with g.scope(self.name):
            gate = made("gate", inner, 0, convolved=False)
            values = made("x", inner, 1)
            b, c = made("b", (*many, self.d_state), 2), made("c", (*many, self.d_state), 3)
            dt = made("dt", heads, 4, convolved=False).cast("float32")
            dt = softplus(dt + g.variable("step_bias", heads, dt_bias))
            dt = maximum(dt, self.least) if self.least else dt
            decay = dt * -exp(g.variable("log_a", heads, log_a))
            work = "scan", self.d_state.size, self.d_head, heads[-1].size
            skip = g.variable("skip", heads, ONES, activation_dtype=u.dtype)
            y = made_by(self, rule, work, values, dt, skip, decay, b, c)
            with self.again(g):
                y = y if self.norm == "first" else y * silu(gate)
                if self.norm:
                    scale = g.variable("out_norm", [*heads, self.d_head], ONES, activation_dtype=y.dtype)
                    y = unit_rms(y, [heads[-1], self.d_head], self.epsilon) * scale
                y = y * silu(gate) if self.norm == "first" else y
            return project(y, "out", inner, [d], self.bias)


@dataclass(frozen=True)
class LightningAttention(Recurrence):
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
            work = "linear", self.d_kv.size, self.d_kv, 1
            b, c = (rename(x, **{self.d_kv.name: "d_state"}) for x in (k, q))
            y = made_by(self, scanned, work, v, decay, b, c)
            scale = g.variable("out_norm", [self.heads, self.d_kv], ONES, activation_dtype=x.dtype)
            y = unit_rms(y, [self.heads, self.d_kv], self.epsilon) * scale
            y = y * sigmoid(project(x, "gate", [d], [self.heads, self.d_kv]))
            return project(y, "o", [self.heads, self.d_kv], [d])


@dataclass(frozen=True)
class SelectiveStateSpace(Recurrence):
    """A layer of Mamba.

    Attributes:
      inner, d_state: channels, and elements of the state of each.
      rank: of the map to steps dt.
      taps: positions of the short convolution; bias, conv_bias: of projections, and of the convolution.
      norms: of dt, b and c: norm(tensor, name, dimension); None: they have none.
      chunk: positions whose states backward makes again at once; fewer if it does not divide the text.
      whole: a call of a library computes all that follows on gate and x (mamba_ssm's mamba_inner_fn).
    """

    inner: Dim
    d_state: Dim
    rank: int
    taps: int = 4
    bias: bool = False
    conv_bias: bool = True
    norms: Callable[[Tensor, str, str], Tensor] | None = None
    chunk: int = 64
    whole: bool = True
    d_model: str = "d_model"
    name: str = "mamba"

    def __call__(self, u: Tensor) -> Tensor:
        """[batch, length, d_model] -> the same."""
        g, d, inner, rank = u.graph, u.dim(self.d_model), self.inner, Dim("dt_rank", self.rank)
        with g.scope(self.name):
            gate, x = (project(u, name, [d], [inner], self.bias) for name in ("gate", "x"))
            with self.again(g):
                x = short_conv(x, "x_conv", self.taps, self.conv_bias)
            with self.again(g, self.whole):
                x = silu(x)
            parts = {"dt_down": rank, "b": self.d_state, "c": self.d_state}
            low, b, c = (project(x, name, [inner], [dim]) for name, dim in parts.items())
            if self.norms is not None:
                names = ((f"{name}_norm", dim.name) for name, dim in parts.items())
                low, b, c = (self.norms(t, *n) for t, n in zip((low, b, c), names, strict=True))
            with self.again(g, self.whole):
                dt = project(low, "dt", [rank], [inner])
            bias = g.variable("step_bias", [inner], dt_bias)
            rate = -exp(g.variable("log_a", [inner, self.d_state], _log_a))
            skip = g.variable("skip", [inner], ONES, activation_dtype=x.dtype)
            work = "selective", self.d_state.size, inner, 1
            y = made_by(self, selective, work, x, dt, bias, rate, b, c, skip)
            with self.again(g):
                gate = silu(gate)
            with self.again(g, self.whole):
                y = y * gate
            return project(y, "out", [inner], [d], self.bias)


def selective(
    x: Tensor, dt: Tensor, bias: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor, chunk: int
) -> Tensor:
    """y_t = h_t c_t + x_t skip, h_t = e^(s_t rate) h_(t-1) + s_t x_t b_t, s = softplus(dt + bias), h_0 = 0;
    x, dt: [batch, length, inner]; rate: [inner, d_state], negative; b, c: [batch, length, d_state]."""
    dt = softplus(dt.cast("float32") + bias)
    length, inner = x.dim("length"), rate.shape.dims[0]
    cut = Chunks.of(length, math.gcd(length.size, chunk))
    shape = [*dt.shape.without(length.name), rate.shape.dims[1]]

    def one(state: Tensor, rate: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        def step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor]]:
            state = state * exp(einsum([dt, rate], shape)) + einsum([dt * x, b], shape)
            return state, (einsum([state, c], [*shape[:-2], inner]),)

        state, (y,) = scan(step, state, cut.place, parts)
        return state, y

    def each(state: Tensor, *parts: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        state, y = remade(one, [state, rate, *parts], lambda dy: dy)
        return state, (y,)

    wide = [cut.cut(t.cast("float32")) for t in (x, dt, b, c)]
    _, (y,) = scan(each, broadcast(constant_like(dt, 0.0), shape), cut.chunks, wide)
    return cut.joined(transpose(y, wide[0].shape)).cast(x.dtype) + x * skip


def _log_a(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Logarithms of 1, 2, 3 ... (S4D)."""
    return np.broadcast_to(np.log(np.arange(1, shape[-1] + 1)), shape)

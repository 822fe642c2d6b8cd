"""The parts that layers of configured models are made of: norms, attention, feed-forward blocks, mixtures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ONES, ZEROS, Constant
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import activation, project
from mesh_tf_core.layers.recurrent import short_conv, unit_rms
from mesh_tf_core.ops.filled import constant
from mesh_tf_core.ops.softmax import masked


@dataclass(frozen=True)
class Norm:
    """Root mean square 1 along a dimension, times a learned scale.

    Attributes:
      around_one: the scale is stored minus 1 (Gemma).
      center: of mean 0 first (Ba et al. 2016); bias: adds a learned bias; scale: whether there is one.
      steps: without `center`, in steps on a float32 copy, as transformers' modules; wide: scaled so, too.
    """

    epsilon: float
    around_one: bool = False
    center: bool = False
    bias: bool = False
    scale: bool = True
    steps: bool = False
    wide: bool = False

    def __call__(self, x: Tensor, name: str, *dims: str) -> Tensor:
        """x, normalised along d_model or over `dims` together."""
        g, own = x.graph, [x.dim(n) for n in dims or ("d_model",)]
        with g.scope(name):
            begin, dtype = ZEROS if self.around_one else ONES, x.dtype
            scale = g.variable("scale", own, begin, activation_dtype=dtype) if self.scale else None
            scale = scale + 1.0 if scale is not None and self.around_one else scale
            bias = g.variable("bias", own, ZEROS, activation_dtype=dtype) if self.bias else None
            if self.center:
                with g.in_call(g.path("layer_norm")):
                    return mtf.layer_norm(x, own[0], scale, bias, self.epsilon)
            if len(own) == 1 and not self.steps:
                return mtf.rms_norm(x, own[0], scale, self.epsilon)
            y = unit_rms(x.cast("float32") if self.steps else x, own, self.epsilon)
            y = y if self.wide else y.cast(dtype)
            return (y if scale is None else y * scale.cast(y.dtype)).cast(dtype)


@dataclass(frozen=True)
class SelfAttention(nn.Attention):
    """Attention as published models have it.

    Attributes:
      norm: of queries and keys, head by head, or over all heads (`across`); of values too (`value_norm`).
      scale: of the logits; cap: their bound, cap tanh(logits / cap), which no kernel does, so that attention
        is then written out; 0: the usual, and none.
      gated: the activation of a projection of the input that results are multiplied by; "": none;
        by_head: it has one number per head.
      d_v: elements of a value; 0: as many as of a key.
      clipped: the bound of queries, keys and values; 0: none.
      times: factors of keys and values.
      tuned: queries are scaled by 1 + b log(1 + floor((position + c) / a)), (a, b, c) (Llama 4); (): not.
      slopes: the factor of biases that grow with a key's position, in each head at another rate (Press et al.
        2022, "ALiBi"; the softmax does not see what all keys of a query have in common); 0: none.
    """

    norm: Norm | None = None
    across: bool = False
    value_norm: bool = False
    scale: float = 0.0
    cap: float = 0.0
    gated: str = ""
    by_head: bool = False
    d_v: int = 0
    clipped: float = 0.0
    times: tuple[float, float] = (1.0, 1.0)
    tuned: tuple[float, ...] = ()
    slopes: float = 0.0
    biased: ClassVar[bool] = True

    def attended(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *seen: Any) -> Tensor:
        """Attends with the biases of positions."""
        if not self.slopes:
            return super().attended(q, k, v, x, *seen)
        mask, _, *others = seen
        count = 2 ** math.floor(math.log2(self.heads.size))
        rates = [2 ** (-8 * (i + 1) / count) for i in range(count)]
        rates += [2 ** (-8 * (i + 0.5) / count) for i in range(self.heads.size - count)]
        slopes = constant(x.graph, np.array(rates, np.float32) * self.slopes, [self.heads])
        bias = mtf.mtf_range(x.graph, k.dim(self.memory_length)).cast("float32") * slopes
        return super().attended(q, k, v, x, mask, bias.cast(x.dtype), *others)

    @property
    def fused(self) -> bool:
        return self.attention == "fused" and not self.cap

    @property
    def value_dim(self) -> Dim:
        """The dimension of values in place of d_kv."""
        return Dim("d_v", self.d_v) if self.d_v else self.d_kv

    def projections(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of the memory."""
        d, biased = x.dim(self.d_model), self.biases not in ("none", "o")
        q = self.queries(x)
        k = project(memory, "k", [d], [*self.kv_dims, self.d_kv], biased and self.biases != "qvo")
        v = k if self.shared_kv else project(memory, "v", [d], [*self.kv_dims, self.value_dim], biased)
        if self.clipped:
            k, v = (mtf.clip(t, -self.clipped, self.clipped) for t in (k, v))
        k = self._normed(k, "k_norm", self.kv_dims)
        if self.value_norm and self.norm is not None:
            v = replace(self.norm, scale=False)(v, "v_norm", self.value_dim.name)
        k, v = (t if n == 1 else t * n for t, n in zip((k, v), self.times, strict=True))
        return q, k, v

    def queries(self, x: Tensor) -> Tensor:
        """[others, d_model] -> [others, heads, d_kv], before positions turn them."""
        q = super().queries(x)
        q = mtf.clip(q, -self.clipped, self.clipped) if self.clipped else q
        q = tuned(self._normed(q, "q_norm", self.head_dims), self.length, self.tuned)
        usual = self.d_kv.size**-0.5
        return q * (self.scale / usual) if self.scale and self.scale != usual else q

    def _normed(self, x: Tensor, name: str, heads: Sequence[Dim]) -> Tensor:
        if self.norm is None:
            return x
        return self.norm(x, name, *([d.name for d in heads] if self.across else []), self.d_kv.name)

    def weights(self, logits: Tensor, mask: Tensor | None, memory: str) -> Tensor:
        capped = mtf.tanh(logits * (1 / self.cap)) * self.cap if self.cap else logits
        return super().weights(capped, mask, memory)

    def joined(self, mixed: Tensor, x: Tensor) -> Tensor:
        if self.gated:
            sizes = [] if self.by_head else [self.value_dim]
            gate = project(x, "gate", [x.dim(self.d_model)], [*self.head_dims, *sizes])
            mixed = mixed * activation(self.gated)(gate)
        return super().joined(mixed, x)

    def within(self, length: int) -> SelfAttention:
        """The same for texts of this length: a window that they fit into is none."""
        return replace(self, window=self.window if self.window < length else 0)


def tuned(q: Tensor, length: str, numbers: tuple[float, ...]) -> Tensor:
    """Queries scaled by position, as of `SelfAttention.tuned`."""
    if not numbers:
        return q
    every, by, first = numbers
    place = mtf.mtf_range(q.graph, q.dim(length)).cast("float32") + first
    return q * (mtf.log1p(mtf.floor(place * (1 / every))) * by + 1.0).cast(q.dtype)


@dataclass(frozen=True)
class ChunkedSelfAttention(SelfAttention, nn.ChunkedAttention):
    """Attention within chunks (Llama 4)."""

    def within(self, length: int) -> SelfAttention:
        if self.chunk < length:
            return self
        return SelfAttention(**{f.name: getattr(self, f.name) for f in fields(SelfAttention)})


@dataclass(frozen=True)
class Indexer:
    """Chooses the `chosen` keys that a query sees (DeepSeek-V3.2): those of the largest sum over its heads of
    w relu(q k). No loss of its own trains it here, so that its gradients are 0; texts of at most `chosen`
    positions see all keys. `turned`: elements with positions."""

    heads: int
    d_head: int
    chosen: int
    turned: int

    def __call__(
        self, low: Tensor, x: Tensor, positions: nn.Rotary, length: str, memory: str
    ) -> tuple[Tensor, Tensor | None]:
        """From the queries' latent vector and x: a zero of each position that depends on its weights (a sum
        over the batch could be taken in no part of it: microbatches), and the mask of keys."""
        heads, d_head = Dim("index_heads", self.heads), Dim("d_index", self.d_head)
        with x.graph.scope("indexer"):
            d = x.dim("d_model")
            q = project(low, "q", [low.dim("q_rank")], [heads, d_head])
            k = Norm(1e-6, center=True, bias=True)(project(x, "k", [d], [d_head]), "k_norm", "d_index")
            w = project(x, "weights", [d], [heads])
            nothing = mtf.reduce_sum(q * 0.0, [heads, d_head]) + mtf.reduce_sum(k * 0.0, [d_head])
            nothing += mtf.reduce_sum(w * 0.0, [heads])
            if x.dim(length).size <= self.chosen:
                return nothing, None
            turned = replace(positions, turned=self.turned)
            q, k, w = (mtf.stop_gradient(t) for t in (q, k, w))
            q, k = turned(q, length, "d_index"), mtf.rename(turned(k, length, "d_index"), **{length: memory})
            rows = list(x.shape.without("d_model"))
            each = mtf.relu(mtf.einsum([q, k], [*rows, heads, k.dim(memory)]))
            found = mtf.einsum([each, w], [*rows, k.dim(memory)])
            before = mtf.mtf_range(x.graph, x.dim(length)) >= mtf.mtf_range(x.graph, k.dim(memory))
            found = masked(found, before)
            return nothing, found >= mtf.nth_largest(found, self.chosen - 1, memory)


@dataclass(frozen=True)
class ScaledLatentAttention(nn.LatentAttention):
    """Latent attention with logits multiplied by `times`, and perhaps an indexer of keys, whose mask later
    layers can read (`keeps`, `reads` and `store` as of `SharingAttention`); `tuned` as of `SelfAttention`;
    `gated`: the activation of a gate per head of results."""

    times: float = 1.0
    gated: str = ""
    tuned: tuple[float, ...] = ()
    indexer: Indexer | None = None
    keeps: str = ""
    reads: str = ""
    store: dict[str, tuple[Tensor, ...]] = field(default_factory=dict, compare=False, repr=False)

    def high(self, low: Tensor, position: Tensor | None = None) -> Tensor:
        q = tuned(super().high(low, position), self.length, self.tuned)
        return q if self.times == 1 else q * self.times

    def joined(self, mixed: Tensor, x: Tensor) -> Tensor:
        if self.gated:
            mixed = mixed * activation(self.gated)(project(x, "gate", [x.dim(self.d_model)], [self.heads]))
        return super().joined(mixed, x)

    def chosen(self, q: Tensor, low: Tensor, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        seen = next(iter(self.store[self.reads]), None) if self.reads else None
        if self.indexer is not None:
            nothing, seen = self.indexer(low, x, self.positions, self.length, self.memory_length)
            q = q + nothing.cast(q.dtype)
        if self.keeps:
            self.store[self.keeps] = () if seen is None else (seen,)
        return q, seen if mask is None or seen is None else mtf.logical_and(mask, seen)


@dataclass(frozen=True)
class ShortConvolution:
    """A convolution of every channel over the last `taps` positions, between two gates (LFM2)."""

    taps: int
    bias: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> the same."""
        d, inner = x.dim("d_model"), Dim("d_inner", x.dim("d_model").size)
        with x.graph.scope("attention"):
            before, after, y = (project(x, n, [d], [inner], self.bias) for n in ("before", "after", "x"))
            y = short_conv(before * y, "conv", self.taps, self.bias)
            return project(after * y, "o", [inner], [d], self.bias)


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block.

    Attributes:
      gated: the activation of one product times another product.
      times: factors of the activation's argument and of the result.
      up: the activation of the other product.
    """

    d_ff: int
    activation: str
    gated: bool = True
    bias: bool = False
    times: tuple[float, float] = (1.0, 1.0)
    name: str = "feed_forward"
    up: str = "linear"

    def __call__(self, x: Tensor) -> Tensor:
        """[others, d_model] -> the same."""
        inner, (before, after) = Dim("d_ff", self.d_ff), self.times
        with x.graph.scope(self.name):
            with x.graph.scope("in"):
                h = nn.Dense((inner,), ("d_model",), self.bias, name="0")(x)
                act = xielu if self.activation == "xielu" else activation(self.activation)
                h = act(h if before == 1 else h * before)
                if self.gated:
                    h = h * nn.Dense((inner,), ("d_model",), self.bias, self.up, "1")(x)
            y = nn.Dense((x.dim("d_model"),), ("d_ff",), self.bias, name="out")(h)
            return y if after == 1 else y * after


def xielu(x: Tensor) -> Tensor:
    """x²a + x/2 above 0, else (exp(x) - 1 - x)b + x/2, with learned a and b (Huang and Schlag 2024)."""
    begin = math.log(math.expm1(0.8)), math.log(math.expm1(0.3))
    above, below = (
        mtf.softplus(x.graph.variable(n, [], Constant(v), activation_dtype=x.dtype))
        for n, v in zip(("above", "below"), begin, strict=True)
    )
    positive = x > 0.0
    under = (mtf.expm1(mtf.where(positive, 0.0, x)) - x) * (below + 0.5)
    return mtf.where(positive, mtf.square(x) * above, under) + x * 0.5


@dataclass(frozen=True)
class Mixture(nn.MixtureOfExperts):
    """A layer's experts; `latent`: the size of the projection of x that they see; 0: x itself."""

    latent: int = 0

    def __call__(
        self, x: Tensor, importance: Tensor | None = None, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[batch, length, d_model] -> the same, and the router's loss."""
        if not self.latent:
            return super().__call__(x, importance, seen)
        d, small = x.dim("d_model"), Dim("d_latent", self.latent)
        with x.graph.scope("latent"):
            low = mtf.rename(project(x, "in", [d], [small]), d_latent="d_model")
        y, loss = replace(self, latent=0, shared=None)(low, seen=x)
        with x.graph.scope("latent"):
            y = project(mtf.rename(y, d_model="d_latent"), "out", [small], [d])
        if self.shared:
            y = y + Mlp(self.shared.size, self.activation, self.gated, name="shared")(x)
        return y, loss


@dataclass(frozen=True)
class BesideExperts:
    """A feed-forward block beside experts, with norms of their own. Experts see the input before the
    block's norm (Gemma 4)."""

    dense: Mlp
    mixture: Mixture
    norm: Norm
    raw: ClassVar[bool] = True

    def __call__(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised input and the input, [batch, length, d_model] -> the same, and the router's loss."""
        g, d = x.graph, x.dim("d_model")
        with g.scope("feed_forward"):
            scale = g.variable("router_scale", [d], ONES, activation_dtype=x.dtype)
            seen = mtf.rms_norm(x, d, scale, self.norm.epsilon) * d.size**-0.5
            before = self.norm(x, "experts_norm")
        mixed, loss = self.mixture(before, seen=seen)
        y = self.dense(y)
        with g.scope("feed_forward"):
            return self.norm(y, "dense_after_norm") + self.norm(mixed, "experts_after_norm"), loss


@dataclass(frozen=True)
class SideBySide:
    """Blocks whose results are added: [(block, factor of its input, factor of its result), ...]."""

    blocks: tuple[tuple[Any, float, float], ...]
    name: ClassVar[str] = "attention"

    def __call__(self, x: Tensor) -> Tensor:
        """[others, d_model] -> the same."""
        first, *others = (block(x if i == 1 else x * i) * o for block, i, o in self.blocks)
        return sum(others, first)

    def within(self, length: int) -> SideBySide:
        """The same for texts of this length."""
        return replace(self, blocks=tuple((within(b, length), i, o) for b, i, o in self.blocks))


def within(block: Any, length: int) -> Any:
    """A block for texts of this length."""
    return block.within(length) if hasattr(block, "within") else block

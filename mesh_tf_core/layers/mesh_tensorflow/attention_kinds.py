"""Variants of attention that change one step: the memory, the logits, the weights, or the combination of
heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ZEROS, Constant, Normal, Uniform
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Attention, Given
from mesh_tf_core.layers.base import project
from mesh_tf_core.layers.dense import FeedForward
from mesh_tf_core.layers.positions import RelativeBias
from mesh_tf_core.ops.activations import clip
from mesh_tf_core.ops.basic import add_n
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.index import mtf_range, one_hot
from mesh_tf_core.ops.math import relu, sigmoid
from mesh_tf_core.ops.random import dropout
from mesh_tf_core.ops.reduce import reduce_mean, reduce_sum
from mesh_tf_core.ops.shape import rename, reshape
from mesh_tf_core.ops.softmax import log_softmax, masked, masked_softmax, softmax


@dataclass(frozen=True)
class CompressedAttention(Attention):
    """Keys and values are made of means over groups of `compression` positions (after Liu et al. 2018,
    "Generating Wikipedia by summarizing long sequences", section 4.2.3, which convolves; means are
    Mesh-TensorFlow's multihead_self_attention_memory_compressed).

    If causal, a query sees the groups that end at or before its position. The first positions see none: their
    weight goes to a key without a value, of logit 0, and their output is 0.
    """

    compression: int = field(default=2, kw_only=True)
    extra_logit: float | None = 0.0
    cached: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compression < 1:
            raise UserError(f"CompressedAttention: compression must be positive, found {self.compression}")
        if self.rotary is not None or self.extra_logit is None:
            raise UserError(
                "CompressedAttention: remove rotary, which is not supported, and set extra_logit, which is "
                "required"
            )

    def memory_of(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """[others, memory_length / compression, d_model]."""
        memory = super().memory_of(x, memory)
        size, at = memory.dim(self.memory_length).size, memory.shape.index(self.memory_length)
        if size % self.compression:
            raise UserError(
                f"CompressedAttention: {self.memory_length}={size} must be a multiple of "
                f"compression={self.compression}"
            )
        groups = [Dim(self.memory_length, size // self.compression), Dim("compressed", self.compression)]
        dims = memory.shape.dims
        return reduce_mean(reshape(memory, Shape([*dims[:at], *groups, *dims[at + 1 :]])), "compressed")

    def relative(self, x: Tensor) -> Tensor:
        """int32 [length, memory_length]: the position of a group's last element minus the query's."""
        length = x.dim(self.length)
        groups = mtf_range(x.graph, Dim(self.memory_length, length.size // self.compression))
        return -(mtf_range(x.graph, length) - (groups * self.compression + (self.compression - 1)))


@dataclass(frozen=True)
class DoublyNormalizedAttention(Attention):
    """Weights that are normalised over the queries and then over the keys, so that every key gets weight
    (Ding et al. 2020, "Attention that does not explain away"), mixed with ordinary weights in a learned
    proportion; Mesh-TensorFlow's hybrid_attention."""

    cached: ClassVar[bool] = False

    def weights(self, logits: Tensor, mask: Tensor | None, memory: str) -> Tensor:
        """The fraction of every key's value that a query takes: the logits' dimensions."""
        seen = logits if mask is None else masked(logits, mask)
        shares = log_softmax(seen, self.length)
        # Masked again: a key that no query sees has equal shares of them all.
        doubly = masked_softmax(shares, mask, memory, self.extra_logit)
        part = logits.graph.variable("doubly", [], Constant(0.5), activation_dtype=logits.dtype)
        part = clip(part, 0.0, 1.0)
        return doubly * part + super().weights(logits, mask, memory) * (1.0 - part)


@dataclass(frozen=True)
class BilinearAttention(Attention):
    """x Q_h m for every head h: keys and values are the memory itself, whose width is d_kv, so the rank of a
    head is not limited (Shazeer et al. 2020, "Talking-heads attention", section 8.4; Mesh-TensorFlow's
    GeneralBilinearSelfAttention)."""

    lacks: ClassVar[tuple[str, ...]] = ("kv_heads", "shared_kv")
    instead: ClassVar[str] = "remove them, because the keys have no heads"

    @property
    def kv_dims(self) -> tuple[Dim, ...]:
        """None: all heads read the same memory."""
        return ()

    def projections(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, and the memory twice."""
        d = x.dim(self.d_model)
        if d.size != self.d_kv.size:
            raise UserError(
                f"BilinearAttention: {self.d_kv.name!r} must have the same size as {d.name!r}, {d.size}, "
                f"found {self.d_kv.size}"
            )
        keys = rename(memory, **{self.d_model: self.d_kv.name})
        return project(x, "q", [d], [*self.head_dims, self.d_kv]), keys, keys


@dataclass(frozen=True)
class BranchedAttention(Attention):
    """Every head is a branch: its output, weighted by kappa, passes through one shared feed-forward block,
    and the branches are added with weights alpha (Ahmed et al. 2017, "Weighted Transformer network",
    equations 5 and 6). Both weights are softmaxes of learned numbers, so that they add up to 1.

    Attributes:
      d_ff: hidden dimension of the feed-forward block.
    """

    d_ff: Dim = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads not in (0, 1, self.heads.size):
            raise UserError(f"BranchedAttention: kv_heads must be 0 or 1, found {self.kv_heads}")

    def joined(self, mixed: Tensor, x: Tensor) -> Tensor:
        """The branches' outputs in x's dimensions."""
        g, d, h = x.graph, x.dim(self.d_model), self.heads

        def share(name: str) -> Tensor:
            return softmax(g.variable(name, [h], Uniform(0.0, 1.0), activation_dtype=x.dtype), h)

        stddev = Normal(1 / math.sqrt(self.d_kv.size))
        o = g.variable("o", [h, self.d_kv, d], stddev, activation_dtype=x.dtype)
        branches = einsum([mixed, o, share("kappa")], [*x.shape.without(d.name), h, d])
        branches = FeedForward(self.d_ff, d_model=self.d_model)(branches)
        return reduce_sum(branches * share("alpha"), h)


@dataclass(frozen=True)
class RelativeAttention(Attention):
    """Logits also hold the query times a learned vector per head and bucket of relative positions (Shaw et
    al. 2018, equation 4, with T5's buckets; Mesh-TensorFlow's contextual relative attention).

    Attributes:
      positions: the relative positions with buckets.
    """

    positions: RelativeBias = field(kw_only=True)
    cached: ClassVar[bool] = False

    def memory_of(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """x itself under the memory's name."""
        if memory is not None:
            raise UserError(
                "RelativeAttention: a separate `memory` is not supported, because it has no positions "
                "relative to the queries; use Attention"
            )
        return super().memory_of(x, None)

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        length: str,
        memory: str,
        mask: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Values weighted by the softmax of queries times keys and positions: q's dimensions."""
        g, count = q.graph, Dim("buckets", self.positions.buckets)
        stddev = Normal(1 / math.sqrt(self.d_kv.size))
        dims = [*self.head_dims, self.d_kv, count]
        table = g.variable("positions", dims, stddev, activation_dtype=q.dtype)
        products = einsum([q, table], [*q.shape.without(self.d_kv.name), count]) * self.d_kv.size**-0.5
        apart = -(mtf_range(g, q.dim(length)) - mtf_range(g, k.dim(memory)))
        # As a product: a look-up would need an index per head and example.
        which = one_hot(self.positions.bucket(apart), count, q.dtype)
        own = einsum([products, which], [*products.shape.without(count.name), k.dim(memory)], chooses=True)
        return super().mix(q, k, v, length, memory, mask, own if bias is None else own + bias.cast(q.dtype))


DYNAMIC = ("x2l", "m2l", "x2w", "m2w")


@dataclass(frozen=True)
class TalkingHeadsAttention(Attention):
    """Products of queries and keys for `key_heads` are mixed linearly into logits for `softmax_heads`, and
    the weights into those of `value_heads` (Shazeer et al. 2020, "Talking-heads attention", section 5).

    Attributes:
      heads: further heads, which all have and which are not mixed, so that they can be split over the mesh;
        of size 1 if all heads are mixed.
      dynamic: mixing matrices that also depend on the input (section 7): on the queries' (`x2l`, `x2w`) or
        the memory's (`m2l`, `m2w`), of the logits or of the weights.
    """

    key_heads: Dim = field(kw_only=True)
    softmax_heads: Dim = field(kw_only=True)
    value_heads: Dim = field(kw_only=True)
    dynamic: tuple[str, ...] = ()
    cached: ClassVar[bool] = False
    lacks: ClassVar[tuple[str, ...]] = ("kv_heads", "shared_kv")
    instead: ClassVar[str] = "set key_heads instead"

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [self.heads.name, self.key_heads.name, self.softmax_heads.name, self.value_heads.name]
        if len(set(names)) < 4:
            raise UserError(
                "TalkingHeadsAttention: heads, key_heads, softmax_heads and value_heads must have four "
                f"different names, found {', '.join(names)}"
            )
        for name in self.dynamic:
            if name not in DYNAMIC:
                raise UserError(
                    f"TalkingHeadsAttention: {name!r} in `dynamic` is unknown; {known_names(name, DYNAMIC)}"
                )

    @property
    def head_dims(self) -> tuple[Dim, ...]:
        """The dimensions of the logits, which a bias may have."""
        return (self.heads, self.softmax_heads)

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        """Attends with logits [others, heads, softmax_heads, length, memory_length]."""
        memory, bias = self.memory_of(x, given.memory), given.bias
        others = x.shape.without(self.length, self.d_model)
        with x.graph.scope(self.name):
            q, k, v = self.projections(x, memory)
            if self.rotary is not None:
                q = self.rotary(q, self.length, self.d_kv.name)
                k = self.rotary(k, self.memory_length, self.d_kv.name)
            pairs = [x.dim(self.length), memory.dim(self.memory_length)]
            share = self.visible(q, pairs[0], pairs[1].size)
            products = einsum([q, k], [*others, self.heads, self.key_heads, *pairs], needed=share)
            products = products * self.d_kv.size**-0.5
            logits = self._talk("logits", products, self.key_heads, self.softmax_heads, x, memory)
            logits = logits if bias is None else logits + bias.cast(logits.dtype)
            weights = self.weights(logits, self.seen(x, given.mask, given.segments), self.memory_length)
            weights = self._talk("weights", weights, self.softmax_heads, self.value_heads, x, memory)
            inner = [self.heads, self.value_heads, self.d_kv]
            made = [*x.shape.without(self.d_model), *inner]
            mixed = einsum([dropout(weights, self.dropout), v], made, needed=share)
            return project(mixed, "o", inner, [x.dim(self.d_model)])

    def projections(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of the memory."""
        d = [x.dim(self.d_model)]
        q = project(x, "q", d, [self.heads, self.key_heads, self.d_kv])
        k = project(memory, "k", d, [self.heads, self.key_heads, self.d_kv])
        return q, k, project(memory, "v", d, [self.heads, self.value_heads, self.d_kv])

    def _talk(self, name: str, p: Tensor, before: Dim, after: Dim, x: Tensor, memory: Tensor) -> Tensor:
        """p with its heads `before` mixed into `after`, by one matrix per unmixed head."""
        d, dims = x.dim(self.d_model), [self.heads, before, after]
        fixed = self._matrix(x, name, dims, 1 / math.sqrt(before.size))
        out = Shape(after if dim == before else dim for dim in p.shape)
        mixers = [fixed]
        for source, kind in ((x, f"x2{name[0]}"), (memory, f"m2{name[0]}")):
            if kind in self.dynamic:
                # A tenth of the fixed matrix' size at first: larger ones made learning hard (section 7).
                w = self._matrix(x, kind, [d, *dims], 0.1 / math.sqrt(d.size * before.size))
                mixers.append(einsum([source, w], [*source.shape.without(d.name), *dims]))
        return add_n([einsum([p, m], out) for m in mixers])

    def _matrix(self, x: Tensor, name: str, dims: Sequence[Dim], stddev: float) -> Tensor:
        return x.graph.variable(name, dims, Normal(stddev), activation_dtype=x.dtype)


KINDS = ("random", "factorized", "dense")


@dataclass(frozen=True)
class Synthesizer(Attention):
    """Logits that are learned, or made from the query's token alone (Tay et al. 2021, "Synthesizer",
    section 3).

    Attributes:
      kind: `random`, a learned matrix [length, memory_length] per head; `factorized`, one of rank `rank`;
        `dense`, relu(q) times a learned matrix [d_kv, memory_length] per head.
      rank: of the factorized kind.
      mixed: the logits are a learned mean of these and of products of queries and keys (section 3.3).
    """

    kind: str = "random"
    rank: int = 8
    mixed: bool = False
    cached: ClassVar[bool] = False
    lacks: ClassVar[tuple[str, ...]] = ("kv_heads", "shared_kv", "rotary")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise UserError(f"Synthesizer: kind={self.kind!r} is unknown; {known_names(self.kind, KINDS)}")
        if self.rank < 1:
            raise UserError(f"Synthesizer: rank must be positive, found {self.rank}")

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        """Attends by weights that no keys decide."""
        memory, bias = self.memory_of(x, given.memory), given.bias
        d = x.dim(self.d_model)
        with x.graph.scope(self.name):
            logits = self._logits(x, memory)
            logits = logits if bias is None else logits + bias.cast(logits.dtype)
            weights = self.weights(logits, self.seen(x, given.mask, given.segments), self.memory_length)
            v = project(memory, "v", [d], [self.heads, self.d_kv])
            mixed = [*x.shape.without(d.name), self.heads, self.d_kv]
            share = self.visible(x, x.dim(self.length), v.dim(self.memory_length).size)
            return self.joined(einsum([dropout(weights, self.dropout), v], mixed, needed=share), x)

    def _logits(self, x: Tensor, memory: Tensor) -> Tensor:
        """[others (not random), heads, length, memory_length]."""
        g, d, h = x.graph, x.dim(self.d_model), self.heads
        length, keys = x.dim(self.length), memory.dim(self.memory_length)
        share = self.visible(x, length, keys.size)
        dims = [*x.shape.without(self.length, d.name), h, length, keys]
        q = project(x, "q", [d], [h, self.d_kv]) if self.mixed or self.kind == "dense" else None

        def weight(name: str, own: list[Dim], stddev: float) -> Tensor:
            return g.variable(name, [h, *own], Normal(stddev), activation_dtype=x.dtype)

        if self.kind == "dense":
            assert q is not None
            made = weight("made", [self.d_kv, keys], 1 / math.sqrt(self.d_kv.size))
            synthetic = einsum([relu(q), made], dims, needed=share)
        elif self.kind == "random":
            synthetic = weight("made", [length, keys], 1.0)
        else:
            rank = Dim("rank", self.rank)
            left = weight("left", [length, rank], self.rank**-0.25)
            synthetic = einsum([left, weight("right", [keys, rank], self.rank**-0.25)], [h, length, keys])
        if not self.mixed:
            return synthetic
        assert q is not None
        products = einsum([q, project(memory, "k", [d], [h, self.d_kv])], dims, needed=share)
        products = products * self.d_kv.size**-0.5
        part = sigmoid(g.variable("alpha", [], ZEROS, activation_dtype=x.dtype))
        return products * (1.0 - part) + synthetic * part

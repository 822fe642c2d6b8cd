"""Variants of attention that change one step: the memory, the weights, or the combination of heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import Constant, Normal, Uniform
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Attention
from mesh_tf_core.layers.base import project
from mesh_tf_core.layers.dense import FeedForward
from mesh_tf_core.layers.positions import RelativeBias
from mesh_tf_core.ops.activations import clip
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.index import mtf_range, one_hot
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

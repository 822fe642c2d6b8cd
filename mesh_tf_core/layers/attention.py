"""Dot-product attention: multi-head, multi-query and grouped-query; causal, cross, banded; as one operation
or written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mesh_tf_core.decoding.cache import Cache
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ZEROS
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import check_rate, project
from mesh_tf_core.layers.caching import AtPosition, keys_at, last_positions, one_of_all, remembered
from mesh_tf_core.layers.positions import Rotary
from mesh_tf_core.ops.attention import attention as fused_attention
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.index import mtf_range
from mesh_tf_core.ops.math import logical_and
from mesh_tf_core.ops.random import dropout
from mesh_tf_core.ops.shape import rename
from mesh_tf_core.ops.softmax import masked_softmax
from mesh_tf_core.visible import visible_pairs

Segments = tuple[Tensor, Tensor]
"""The segment ids of queries and of keys: the number of the text that each position belongs to."""

FORMS = ("fused", "plain")
"""Attention as one operation, or written out."""
BIASES = ("none", "o", "qkv", "qvo", "all")


@dataclass(frozen=True)
class Given:
    """The arguments of an attention besides x, as `Attention` is called with them."""

    memory: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    cache: Cache | None = None
    segments: Segments | None = None


@dataclass(frozen=True)
class Attention:
    """softmax(q k / sqrt(d_kv)) v with projections (Vaswani et al. 2017, section 3.2).

    Queries have dimensions [heads, d_kv]. With fewer heads of keys and values than of queries they are
    [heads: kv_heads, group, d_kv] and a group shares one (Ainslie et al. 2023, grouped-query); one head of
    keys and values has no dimension, so that the queries' heads can be split (Shazeer 2019, multi-query).

    Attributes:
      heads, d_kv: heads of queries; elements per head.
      kv_heads: heads of keys and values, a divisor of `heads`; 0 means as many.
      causal: a query sees keys up to its own position.
      window: a query sees fewer than this many positions back (without `causal`: and ahead); 0: all.
      rotary: turns queries and keys by their positions.
      dropout: rate on the weights.
      shared_kv: keys are the values: one projection for both.
      extra_logit: of a key without a value, so that the weights may add up to less than 1; None: no such key.
      sinks: that logit is learned, per head (gpt-oss).
      biases: which projections add a learned bias: `none`, `o` (as GPT-Neo), `qkv` (as Qwen 2), `qvo` (as
        Whisper), or `all` (as BERT, GPT-2, ViT).
      attention: `fused`, one operation that never holds all logits (`mtf.attention`); or `plain`, written out
        in products and a softmax. Attention with other logits or weights, and texts that grow position by
        position, are always written as separate operations.
      length, memory_length, d_model: names of the positions of queries and of keys, and of the features.
    """

    heads: Dim
    d_kv: Dim
    kv_heads: int = 0
    causal: bool = False
    window: int = 0
    rotary: Rotary | None = None
    dropout: float = 0.0
    shared_kv: bool = False
    extra_logit: float | None = None
    sinks: bool = False
    biases: str = "none"
    attention: str = "fused"
    length: str = "length"
    memory_length: str = "memory_length"
    d_model: str = "d_model"
    name: str = "attention"
    cached: ClassVar[bool] = True
    """True if it can decode position by position."""
    biased: ClassVar[bool] = False
    """True if its own projections have biases."""
    lacks: ClassVar[tuple[str, ...]] = ()
    """The fields and arguments of `Attention` that it does not support."""
    instead: ClassVar[str] = "remove them"
    """The remedy where one of these is given."""

    def __post_init__(self) -> None:
        self._refuse(any(bool(getattr(self, name, None)) for name in self.lacks))
        check_rate(self, self.dropout)
        if self.attention not in FORMS:
            raise UserError(
                f"{type(self).__name__}: attention={self.attention!r} is unknown; "
                f"{known_names(self.attention, FORMS)}"
            )
        if self.biases not in BIASES:
            raise UserError(
                f"{type(self).__name__}: biases={self.biases!r} is unknown; "
                f"{known_names(self.biases, BIASES)}"
            )
        steps = ("projections", "queries", "joined")
        own = any(getattr(type(self), s) is not getattr(Attention, s) for s in steps)
        if self.biases != "none" and own and not self.biased:
            raise UserError(f"{type(self).__name__}: this layer supports no biases; use biases='none'")
        if self.kv_heads < 0 or (self.kv_heads and self.heads.size % self.kv_heads):
            raise UserError(
                f"{type(self).__name__}: heads={self.heads.size} must be a multiple of "
                f"kv_heads={self.kv_heads}"
            )
        if self.window < 0:
            raise UserError(
                f"{type(self).__name__}: window must be at least 0 positions, found {self.window}"
            )

    @property
    def fused(self) -> bool:
        """True if it is one operation."""
        steps = ("mix", "weights", "seen", "allowed", "relative")
        return self.attention == "fused" and all(
            getattr(type(self), s) is getattr(Attention, s) for s in steps
        )

    @property
    def kv_dims(self) -> tuple[Dim, ...]:
        """The dimensions of keys and values besides d_kv."""
        count = self.kv_heads or self.heads.size
        return () if count == 1 < self.heads.size else (Dim(self.heads.name, count),)

    @property
    def head_dims(self) -> tuple[Dim, ...]:
        """The dimensions of queries besides d_kv, which a bias may have."""
        count = self.kv_heads or self.heads.size
        if count in (1, self.heads.size):
            return (self.heads,)
        return (*self.kv_dims, Dim("group", self.heads.size // count))

    @property
    def value_dim(self) -> Dim:
        """The dimension of values in place of d_kv."""
        return self.d_kv

    def __call__(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        cache: Cache | None = None,
        segments: Segments | None = None,
    ) -> Tensor:
        """[others, length, d_model] -> the same.

        Args:
          memory: [others, memory_length, d_model] to attend to; by default x itself.
          mask: bool with any of the logits' dimensions [others, heads, length, memory_length]; keys count
            where it holds.
          bias: added to the logits, as from `RelativeBias`.
          segments: int numbers of the text that every query [others, length] and every key [others,
            memory_length] belongs to, where several are packed into a row; a query sees its own text.
          cache: of a text that grows (see `decoding`). At a position, x is [others, d_model]; keys and values
            of a memory are those of when the prompts were read.
        """
        given = Given(memory, mask, bias, cache, segments)
        self._refuse(any(getattr(given, name, None) is not None for name in self.lacks))
        self._check_cached(given)
        if one_of_all(cache):
            return self.at_position(x, memory is not None, mask, bias, cache)
        return self.over_text(x, given)

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        """Attends from all positions of x: the call, unless a cache is at one position."""
        crosses, memory, cache = given.memory is not None, self.memory_of(x, given.memory), given.cache
        with x.graph.scope(self.name):
            q, k, v = self.projections(x, memory)
            if self.rotary is not None:
                q = self.rotary(q, self.length, self.d_kv.name)
                k = self.rotary(k, self.memory_length, self.d_kv.name)
            if cache is not None:
                self.remember(cache, k, v, crosses)
            return self.joined(self.attended(q, k, v, x, given.mask, given.bias, given.segments), x)

    def attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        segments: Segments | None = None,
    ) -> Tensor:
        """Attends from the queries of x over all positions: [q's dimensions]."""
        if self.fused:
            return fused_attention(
                q,
                k,
                v,
                self.length,
                self.memory_length,
                self.d_kv,
                bias=bias,
                mask=mask,
                segments=segments,
                causal=self.causal,
                window=self.window,
                extra_logit=self.sink(x),
                dropout=self.dropout,
            )
        seen = self.seen(x, mask, segments)
        return self.mix(q, k, v, self.length, self.memory_length, seen, bias)

    def memory_of(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """The tensor that is attended to: the memory, or x itself under the memory's name."""
        if memory is None:
            return rename(x, **{self.length: self.memory_length})
        if self.causal or self.window or self.rotary:
            raise UserError(
                f"{type(self).__name__}: causal, window and rotary need keys from the queries' own text, "
                "but `memory` is another text; remove these options or `memory`"
            )
        return memory

    def seen(self, x: Tensor, mask: Tensor | None, segments: Segments | None = None) -> Tensor | None:
        """True where the mask, the segments and the positions let a query see a key."""
        if segments is not None:
            mask = both(mask, segments[0].equal(segments[1]))
        if self.causal or self.window:
            return both(mask, self.allowed(self.relative(x)))
        return mask

    def _refuse(self, given: bool) -> None:
        if given:
            every = ", ".join(self.lacks[:-1]) + " and " * (len(self.lacks) > 1) + self.lacks[-1]
            verb = "are" if len(self.lacks) > 1 else "is"
            raise UserError(f"{type(self).__name__}: {every} {verb} not supported; {self.instead}")

    def _check_cached(self, given: Given) -> None:
        """UserError unless this attention can read a text that grows."""
        if given.cache is None:
            return
        if not self.cached:
            raise UserError(f"{type(self).__name__}: this layer cannot decode with a cache; use Attention")
        hidden = given.mask is not None or given.segments is not None
        if given.memory is None and (hidden or not self.causal):
            raise UserError(
                f"{type(self).__name__}: decoding with a cache needs causal=True and neither a mask nor "
                "segments"
            )

    def remember(self, cache: Cache, k: Tensor, v: Tensor, crosses: bool) -> None:
        """Leaves the keys and values of the prompts in a cache: of a memory all, of a text as many as its
        window can see."""
        count = k.dim(self.memory_length).size if crosses else self.kept(cache)
        cache.put("keys", last_positions(k, self.memory_length, count, cache), not crosses)
        if v is not k:
            cache.put("values", last_positions(v, self.memory_length, count, cache), not crosses)

    def at_position(
        self, x: Tensor, crosses: bool, mask: Tensor | None, bias: Tensor | None, cache: AtPosition
    ) -> Tensor:
        """[others, d_model], the position of the cache alone -> the same."""
        with x.graph.scope(self.name):
            if crosses:
                q = self.queries(x)
                k, v = remembered(x.graph, cache)
            else:
                q, k, v = self.projections(x, x)
                if self.rotary is not None:
                    place = self.place(cache)
                    q, k = (self.rotary(t, self.length, self.d_kv.name, place) for t in (q, k))
                k, v = remembered(x.graph, cache, k, v, self.memory_length)
                mask = self.seen_at(x, cache)
            return self.joined(self.mix(q, k, v, self.length, self.memory_length, mask, bias), x)

    def place(self, cache: AtPosition) -> Tensor:
        """The position of a cache, counted from the first key that a query may see."""
        return cache.position

    def seen_at(self, x: Tensor, cache: AtPosition) -> Tensor:
        """Bool [memory_length]: which of a cache's keys the query at its position sees."""
        relative = self.relative_at(x, cache)
        return logical_and(self.allowed(relative), relative >= -self.place(cache))

    def kept(self, cache: Cache) -> int:
        """Positions whose keys and values a cache stores."""
        return min(self.window or cache.length, cache.length)

    def projections(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of the memory."""
        q, d, biased = self.queries(x), x.dim(self.d_model), self.biases not in ("none", "o")
        if self.shared_kv:
            kv = project(memory, "kv", [d], [*self.kv_dims, self.d_kv], biased)
            return q, kv, kv
        k = project(memory, "k", [d], [*self.kv_dims, self.d_kv], self.biases in ("qkv", "all"))
        return q, k, project(memory, "v", [d], [*self.kv_dims, self.d_kv], biased)

    def queries(self, x: Tensor) -> Tensor:
        """[others, d_model] -> [others, heads, d_kv]."""
        biased = self.biases not in ("none", "o")
        return project(x, "q", [x.dim(self.d_model)], [*self.head_dims, self.d_kv], biased)

    def relative(self, x: Tensor) -> Tensor:
        """int32 [length, memory_length]: the key's position minus the query's, for `RelativeBias`."""
        size = x.dim(self.length).size
        keys = mtf_range(x.graph, Dim(self.memory_length, size))
        return -(mtf_range(x.graph, Dim(self.length, size)) - keys)

    def relative_at(self, x: Tensor, cache: Cache | None) -> Tensor:
        """`relative`; where a cache is at a position, [memory_length]: of the keys that it holds (one that is
        not there yet would lie before position 0)."""
        if not one_of_all(cache):
            return self.relative(x)
        return keys_at(x.graph, Dim(self.memory_length, self.kept(cache)), cache)

    def allowed(self, relative: Tensor) -> Tensor:
        """Bool: which keys a query sees by their relative positions."""
        mask = relative <= 0 if self.causal else None
        if self.window:
            mask = both(mask, relative > -self.window)
            mask = mask if self.causal else both(mask, relative < self.window)
        assert mask is not None
        return mask

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
        """Values weighted by the softmax of queries times keys: q's dimensions, with `value_dim` for d_kv."""
        heads = [d.name for d in self.head_dims]
        others = [d for d in q.shape if d.name not in (*heads, length, self.d_kv.name)]
        positions = [d for d in q.shape if d.name == length]
        dims = Shape([*others, *self.head_dims, *positions, k.dim(memory)])
        share = self.visible(q, positions[0], k.dim(memory).size) if positions else 1.0
        logits = einsum([q * q.dim(self.d_kv.name).size ** -0.5, k], dims, needed=share)
        weights = self.weights(logits if bias is None else logits + bias.cast(logits.dtype), mask, memory)
        found = [self.value_dim if d.name == self.d_kv.name else d for d in q.shape]
        return einsum([dropout(weights, self.dropout), v], found, needed=share)

    def visible(self, q: Tensor, rows: Dim, keys: int) -> float:
        """The share of the pairs of a query and one of `keys` keys that positions let see each other."""
        return self.seen_of(rows.size, keys) if rows.size == keys else 1.0

    def seen_of(self, length: int, keys: int) -> float:
        """`visible` of a text, with so many keys for every query."""
        if not (self.causal or self.window):
            return 1.0
        back = self.window or length
        return visible_pairs(0, length, length, back, 0 if self.causal else back - 1) / (length * keys)

    def weights(self, logits: Tensor, mask: Tensor | None, memory: str) -> Tensor:
        """The fraction of every key's value that a query takes: the logits' dimensions."""
        return masked_softmax(logits, mask, memory, self.sink(logits))

    def sink(self, x: Tensor) -> Tensor | float | None:
        """The logit of the key without a value."""
        if not self.sinks:
            return self.extra_logit
        return x.graph.variable("sink", self.head_dims, ZEROS, activation_dtype=x.dtype)

    def joined(self, mixed: Tensor, x: Tensor) -> Tensor:
        """The heads' outputs projected to x's dimensions."""
        last = [x.dim(self.d_model)]
        return project(
            mixed, "o", [*self.head_dims, self.value_dim], last, self.biases in ("o", "qvo", "all")
        )


def both(a: Tensor | None, b: Tensor) -> Tensor:
    """True where both masks hold."""
    return b if a is None else logical_and(a, b)

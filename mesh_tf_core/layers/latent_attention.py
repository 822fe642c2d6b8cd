"""Multi-head latent attention: keys and values of all heads are made of one short vector per position, which
is all that a cache holds (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

  c = norm(x W_c) [kv_rank]        r = rotary(x W_r) [d_rotary], one for all heads
  keys of a head = (c W_k, r)      values of a head = c W_v [d_v]
  queries of a head = (a, rotary(b)), (a, b) = x W_q, or norm(x W_d) W_u with the rank q_rank

Products of queries and keys are sums over d_kv + d_rotary, and are scaled by the root of that.

At one position, W_k is multiplied into the query and W_v into the result instead, so that the heads attend to
c and r themselves (section 2.1.2: the up-projections are absorbed).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Attention, Given
from mesh_tf_core.layers.base import project
from mesh_tf_core.layers.caching import AtPosition, remembered
from mesh_tf_core.layers.norm import RMSNorm
from mesh_tf_core.layers.positions import Rotary
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.shape import concat, rename, slice_dim

_ROTARY = Rotary()


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Attention with keys and values of low rank, and a separate part for positions.

    DeepSeek-V2-Lite: 16 heads, d_kv 128, d_v 128, kv_rank 512, d_rotary 64; V2 and V3: 128 heads and
    q_rank 1536.

    Attributes:
      d_kv: elements of a query and a key without positions; d_rotary: elements with rotary positions, an even
        number.
      d_v: elements of a value, under a separate name.
      kv_rank: the vector that keys and values are made of; q_rank: the one of queries (None: they are made of
        x).
      positions: turns the rotary part.
      epsilon: of the norms of both vectors.

    Called as `Attention`; a cache holds kv_rank + d_rotary numbers a position.
    """

    kv_rank: Dim = field(kw_only=True)
    d_rotary: int = field(kw_only=True)
    d_v: Dim = field(kw_only=True)
    q_rank: Dim | None = field(default=None, kw_only=True)
    positions: Rotary = field(default=_ROTARY, kw_only=True)
    epsilon: float = field(default=1e-6, kw_only=True)
    lacks: ClassVar[tuple[str, ...]] = ("kv_heads", "shared_kv", "rotary", "memory")
    instead: ClassVar[str] = "set `positions` for rotary positions, and use Attention for the others"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_rotary < 2 or self.d_rotary % 2:
            raise UserError(f"LatentAttention: d_rotary must be even and positive, found {self.d_rotary}")
        if self.d_v.name == self.d_kv.name:
            raise UserError(
                f"LatentAttention: d_v and d_kv are both named {self.d_kv.name!r}; rename one of them"
            )

    @property
    def value_dim(self) -> Dim:
        """The dimension of values in place of d_kv."""
        return self.d_v

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        """Attends to keys and values that grow from one vector per position."""
        with x.graph.scope(self.name):
            low = self.low(x)
            q, mask = self.chosen(self.high(low), low, x, given.mask)
            turned, latent = self._latent(rename(x, **{self.length: self.memory_length}), self.memory_length)
            if given.cache is not None:
                self.remember(given.cache, turned, latent, False)
            k, v = self._grown(turned, latent)
            return self.joined(self.attended(q, k, v, x, mask, given.bias, given.segments), x)

    def at_position(
        self, x: Tensor, crosses: bool, mask: Tensor | None, bias: Tensor | None, cache: AtPosition
    ) -> Tensor:
        """[others, d_model], the position of the cache alone -> the same."""
        with x.graph.scope(self.name):
            q = self.queries(x, cache.position)
            turned, latent = self._latent(x, self.length, cache.position)
            turned, latent = remembered(x.graph, cache, turned, latent, self.memory_length)
            plain, rotary = self._parts(q * q.dim(self.d_kv.name).size ** -0.5)
            others = [d for d in q.shape if d.name not in (self.heads.name, self.d_kv.name)]
            rows = [*others, self.heads]
            absorbed = einsum([plain, self._up(x, "k_up", self.d_kv)], [*rows, self.kv_rank])
            dims = Shape([*rows, latent.dim(self.memory_length)])
            logits = einsum([absorbed, latent], dims) + einsum([rotary, turned], dims)
            if bias is not None:
                logits = logits + bias.cast(logits.dtype)
            weights = self.weights(logits, self.seen_at(x, cache), self.memory_length)
            found = einsum([weights, latent], [*rows, self.kv_rank])
            return self.joined(einsum([found, self._up(x, "v_up", self.d_v)], [*rows, self.d_v]), x)

    def queries(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """[others, d_model] -> [others, heads, d_kv + d_rotary], turned; `position`: of all of x."""
        return self.high(self.low(x), position)

    def low(self, x: Tensor) -> Tensor:
        """The input of queries: a vector of q_rank elements, or x."""
        if self.q_rank is None:
            return x
        down = project(x, "q_down", [x.dim(self.d_model)], [self.q_rank])
        return RMSNorm(self.q_rank.name, "q_norm", self.epsilon)(down)

    def high(self, low: Tensor, position: Tensor | None = None) -> Tensor:
        """The queries of `low`."""
        dim, name = (self.d_model, "q") if self.q_rank is None else (self.q_rank.name, "q_up")
        plain, rotary = self._parts(project(low, name, [low.dim(dim)], [self.heads, self._both]))
        return concat([plain, self.positions(rotary, self.length, self.d_kv.name, position)], self.d_kv.name)

    def chosen(self, q: Tensor, low: Tensor, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The queries, and a mask of the keys that each may see, for layers that choose keys."""
        return q, mask

    @property
    def _both(self) -> Dim:
        return Dim(self.d_kv.name, self.d_kv.size + self.d_rotary)

    def _parts(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Of queries: what knows no positions, and what does."""
        name, size = self.d_kv.name, self.d_kv.size
        return slice_dim(q, name, 0, size), slice_dim(q, name, size, self.d_rotary)

    def _latent(self, x: Tensor, length: str, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """r [others, d_rotary], turned, under the name of d_kv, and c [others, kv_rank]."""
        d = x.dim(self.d_model)
        turned = project(x, "k_rotary", [d], [Dim(self.d_kv.name, self.d_rotary)])
        low = project(x, "kv_down", [d], [self.kv_rank])
        norm = RMSNorm(self.kv_rank.name, "kv_norm", self.epsilon)
        return self.positions(turned, length, self.d_kv.name, position), norm(low)

    def _grown(self, turned: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads."""
        plain = project(latent, "k_up", [self.kv_rank], [self.heads, self.d_kv])
        same = broadcast(turned, [*plain.shape.without(self.d_kv.name), turned.dim(self.d_kv.name)])
        v = project(latent, "v_up", [self.kv_rank], [self.heads, self.d_v])
        return concat([plain, same], self.d_kv.name), v

    def _up(self, x: Tensor, name: str, width: Dim) -> Tensor:
        """The weight [kv_rank, heads, width] that makes keys or values."""
        dims = [self.kv_rank, self.heads, width]
        return x.graph.variable(name, dims, Normal(self.kv_rank.size**-0.5), activation_dtype=x.dtype)

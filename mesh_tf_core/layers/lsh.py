"""Attention among positions with equal hashes (Kitaev, Kaiser, Levskaya 2020, "Reformer: the efficient
transformer", section 2): work is proportional to the length, not to its square."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import check_rate, project
from mesh_tf_core.ops.along import take_along
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.index import mtf_range
from mesh_tf_core.ops.math import exp, rsqrt, square
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.order import argmax, argsort
from mesh_tf_core.ops.random import dropout, random_normal
from mesh_tf_core.ops.reduce import reduce_sum
from mesh_tf_core.ops.shape import concat, rename, reshape
from mesh_tf_core.ops.softmax import logsumexp, softmax

_HIDDEN, _ITSELF = -1e9, -1e5


@dataclass(frozen=True)
class LSHAttention:
    """softmax(q k) v with keys k = q / |q|, restricted to positions of like direction, without biases.

    In every round, positions are sorted by a hash of q, argmax [q R; -q R] of a random R (Andoni et al.
    2015), and cut into chunks; a query sees its own chunk and the one before. Rounds are joined with the
    weights of their sums of exponentials. A position sees itself only if it sees nothing else. R is another
    one in every step, layer, round and head, and the same under every layout; no gradient flows through the
    hash. A key that occurs in several rounds counts in each of them (the paper's N of appendix A is 1).

    Layouts: the batch, `heads`, `rounds` and `d_kv` may be split, and also `chunks`, whose neighbours then
    exchange a chunk. If the length is split, the hashes are gathered for sorting (one number for each
    position, round and head), and the values in sorted order are summed over the devices.

    Attributes:
      chunk: positions of a chunk, a divisor of the length.
      buckets: values of the hash, an even number; about 2 length / chunk in the paper.
      rounds: independent hashes.
      causal: a query sees positions up to its own.
      within_buckets: within its chunks, a query sees only keys of its own hash (equation 4); else all.
      dropout: rate on the weights.
      length, chunks, d_model: names of the positions, of the chunks, and of the features.
    """

    heads: Dim
    d_kv: Dim
    chunk: int
    buckets: int
    rounds: Dim
    causal: bool = False
    within_buckets: bool = False
    dropout: float = 0.0
    length: str = "length"
    chunks: str = "chunks"
    d_model: str = "d_model"
    name: str = "lsh_attention"

    def __post_init__(self) -> None:
        check_rate(self, self.dropout)
        if self.chunk < 1:
            raise UserError(f"LSHAttention: chunk must be at least 1 position, found {self.chunk}")
        if self.buckets < 2 or self.buckets % 2:
            raise UserError(f"LSHAttention: buckets must be even and at least 2, found {self.buckets}")

    def __call__(self, x: Tensor) -> Tensor:
        """[others, length, d_model] -> the same."""
        size, d = x.dim(self.length).size, x.dim(self.d_model)
        if size % self.chunk:
            raise UserError(f"LSHAttention: {self.length}={size} must be a multiple of chunk={self.chunk}")
        if self.buckets * size >= 2**31:
            raise UserError(
                f"LSHAttention: {self.length}={size} times buckets={self.buckets} must be less than 2^31; "
                "use fewer buckets or a shorter length"
            )
        with x.graph.scope(self.name):
            q = project(x, "qk", [d], [self.heads, self.d_kv])
            v = project(x, "v", [d], [self.heads, self.d_kv])
            hashes = self.hashes(q)
            order = self.order(hashes)
            mixed, total = self.mix(q, v, hashes, order)
            undo = rename(argsort(order, self._sorted), **{self._sorted: self.length})
            # The round whose exponentials sum to more has met keys of more weight.
            weights = softmax(take_along(total, undo, self._sorted), self.rounds.name)
            found = take_along(mixed, undo, self._sorted)
            joined = einsum([weights.cast(found.dtype), found], q.shape)
            return project(joined, "o", [self.heads, self.d_kv], [d])

    @property
    def _sorted(self) -> str:
        return f"sorted_{self.length}"

    def hashes(self, q: Tensor) -> Tensor:
        """int32 [others, rounds, heads, length]: the bucket of every position of q [others, length, heads,
        d_kv]."""
        half = Dim("rotations", self.buckets // 2)
        rotations = random_normal(q.graph.random_key(), [self.rounds, self.heads, self.d_kv, half])
        turned = einsum([q, rotations.cast(q.dtype)], [*self._dims(q), q.dim(self.length), half])
        return argmax(concat([turned, -turned], half), half)

    def order(self, hashes: Tensor) -> Tensor:
        """int32 [others, rounds, heads, sorted_length]: positions by hash; equal hashes keep their order."""
        length = hashes.dim(self.length)
        keys = hashes * length.size + mtf_range(hashes.graph, length)
        return rename(argsort(keys, length), **{self.length: self._sorted})

    def mix(self, q: Tensor, v: Tensor, hashes: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Attends in every round, in sorted order; returns results and the logarithms of their sums of
        exponentials."""
        inside, around = f"chunk_{self.length}", f"chunk_memory_{self.length}"
        queries = self._cut(take_along(q, order, self.length))
        keys = rename(_wide(queries), **{inside: around})
        keys = (keys * rsqrt(reduce_sum(square(keys), self.d_kv) + 1e-6)).cast(q.dtype)
        values = rename(self._cut(take_along(v, order, self.length)), **{inside: around})
        here = self._cut(order)
        there = self._with_previous(rename(here, **{inside: around}) + 1, around) - 1
        seen = there >= 0
        if self.causal:
            seen = seen & (here >= there)
        if self.within_buckets:
            bucket = self._cut(take_along(hashes, order, self.length))
            others = self._with_previous(rename(bucket, **{inside: around}), around)
            seen = seen & bucket.equal(others)
        keys, values = (self._with_previous(t, around) for t in (keys, values))
        dims = [*queries.shape.without(self.d_kv.name), keys.dim(around)]
        logits = _wide(einsum([queries, keys], dims))
        logits = where(seen, where(here.equal(there), _ITSELF, logits), _HIDDEN)
        total = logsumexp(logits, around)
        weights = dropout(exp(logits - total).cast(v.dtype), self.dropout)
        mixed = einsum([weights, values], queries.shape)
        return self._joined(mixed), self._joined(total)

    def _dims(self, q: Tensor) -> list[Dim]:
        own = (self.length, self.heads.name, self.d_kv.name)
        return [*(d for d in q.shape if d.name not in own), self.rounds, self.heads]

    def _cut(self, t: Tensor) -> Tensor:
        """sorted_length -> chunks, chunk_length."""
        at, size = t.shape.index(self._sorted), t.dim(self._sorted).size
        parts = [Dim(self.chunks, size // self.chunk), Dim(f"chunk_{self.length}", self.chunk)]
        return reshape(t, Shape([*t.shape.dims[:at], *parts, *t.shape.dims[at + 1 :]]))

    def _joined(self, t: Tensor) -> Tensor:
        """chunks, chunk_length -> sorted_length."""
        at, size = t.shape.index(self.chunks), t.dim(self.chunks).size * self.chunk
        return reshape(t, Shape([*t.shape.dims[:at], Dim(self._sorted, size), *t.shape.dims[at + 2 :]]))

    def _with_previous(self, t: Tensor, around: str) -> Tensor:
        """A chunk behind the one before it; before the first one are zeros."""
        return t if t.dim(self.chunks).size == 1 else concat([shift(t, 1, self.chunks), t], around)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == "float64" else x.cast("float32")

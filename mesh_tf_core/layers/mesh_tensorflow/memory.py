"""A large memory of values; every position reads a few of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ZEROS, Normal, Uniform
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import project
from mesh_tf_core.layers.norm import LayerNorm
from mesh_tf_core.ops.along import take_along
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.index import gather
from mesh_tf_core.ops.order import top_k
from mesh_tf_core.ops.shape import rename, reshape
from mesh_tf_core.ops.softmax import softmax
from mesh_tf_core.ops.stacking import unstack


@dataclass(frozen=True)
class ProductKeyMemory:
    """keys^2 values whose keys are pairs from two short lists. The `best` pairs are among the `best` of
    either list, so no query is compared with all values (Lample et al. 2019, "Large memory layers with
    product keys", section 3.2; queries are layer-normalised as in Mesh-TensorFlow, where the paper normalises
    over the batch).

    The table of values has the dimension `values`; if it is split, every device reads its own values, and the
    results are added.

    Attributes:
      heads: queries per position, each with separate keys.
      keys: length of the two lists; the memory has its square.
      d_key: features of half a query.
      best: number of values that a head reads.
      values: name of the dimension of all values.
    """

    heads: Dim
    keys: Dim
    d_key: Dim
    best: int
    values: str = "memory_values"
    d_model: str = "d_model"
    name: str = "memory"

    def __post_init__(self) -> None:
        if not 1 <= self.best <= self.keys.size:
            raise UserError(
                f"ProductKeyMemory: best={self.best} must be from 1 to the number of keys, {self.keys.size}"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """[others, d_model] -> the same."""
        g, d = x.graph, x.dim(self.d_model)
        halves, slots = Dim("halves", 2), Dim(self.values, self.keys.size**2)
        query = [self.heads, halves, self.d_key]
        with g.scope(self.name):
            width = 1 / math.sqrt(self.d_key.size)
            dims = [self.heads, halves, self.keys, self.d_key]
            keys = g.variable("keys", dims, Uniform(-width, width), activation_dtype=x.dtype)
            bias = g.variable("query_bias", query, ZEROS, activation_dtype=x.dtype)
            q = LayerNorm(self.d_key.name, bias=True)(project(x, "query", [d], query) + bias)
            scores, ids = self._nearest(q, keys)
            stddev = Normal(1 / math.sqrt(d.size))
            table = g.variable("values", [slots, d], stddev, activation_dtype=x.dtype)
            read = gather(table, ids, slots)
            return einsum([read, softmax(scores, "best")], x.shape)

    def _nearest(self, q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the best pairs of keys [others, heads, best], and the numbers of their values."""
        n, best = self.keys.size, Dim("best", self.best)
        scores = einsum([q, keys], [*q.shape.without(self.d_key.name), self.keys])
        found, places = top_k(scores, self.keys, best)
        (first, second), (row, column) = (unstack(t, "halves") for t in (found, places))
        both = first + rename(second, best="best_2")
        number = row * n + rename(column, best="best_2")
        pairs = Shape([*both.shape.without("best", "best_2"), Dim("pairs", self.best**2)])
        values, at = top_k(reshape(both, pairs), "pairs", best)
        return values, take_along(reshape(number, pairs), at, "pairs")

"""Tables: of tokens, which may be split along the vocabulary and tied to the output, and of positions."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.decoding.cache import Cache
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Normal
from mesh_tf_core.ir.tensor import Builder, Tensor
from mesh_tf_core.layers.base import project
from mesh_tf_core.layers.caching import one_of_all
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.index import dynamic_slice, gather
from mesh_tf_core.ops.shape import rename, slice_dim


@dataclass(frozen=True)
class Embedding:
    """A table [vocab, d_model] of tokens, and logits over the same vocabulary.

    Split along the vocabulary, every device looks up the tokens that it has and the results are added
    (Shoeybi et al. 2019, "Megatron-LM", section 3). The table is made by `table`, so that several inputs, and
    the output if it is tied (Press & Wolf 2017), can share it:

        embedding = Embedding(vocab, d_model)
        table = embedding.table(graph)
        x = embedding(table, tokens)
        logits = embedding.logits(x, table)     # tied; without the table: a projection of its own

    Attributes:
      dtype: of the result; the table itself is float32.
      stddev: of the initial table.
    """

    vocab: Dim
    d_model: Dim
    dtype: str = "float32"
    stddev: float = 0.02
    name: str = "embedding"

    def table(self, graph: Builder) -> Tensor:
        """A new variable [vocab, d_model]."""
        with graph.scope(self.name):
            dims = [self.vocab, self.d_model]
            return graph.variable("tokens", dims, Normal(self.stddev), activation_dtype=self.dtype)

    def __call__(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of the table: ids [others] -> [others, d_model]; zeros for ids outside of the vocabulary."""
        with ids.graph.scope(self.name):
            return gather(table, ids, self.vocab)

    def logits(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        """[others, d_model] -> [others, vocab]."""
        with x.graph.scope("output"):
            if table is None:
                return project(x, "projection", [self.d_model], [self.vocab])
            return einsum([x, table], [*x.shape.without(self.d_model.name), self.vocab])


@dataclass(frozen=True)
class LearnedPositions:
    """A learned vector per position, added to x.

    Attributes:
      count: positions that have one; at least the length of x.
      length: name of x's dimension of positions.
      first: the row of x's first position.
    """

    count: int
    length: str = "length"
    d_model: str = "d_model"
    stddev: float = 0.02
    name: str = "embedding"
    first: int = 0

    @classmethod
    def named(cls, positions: str, length: int, *others: str) -> LearnedPositions:
        """Parses a model's hyperparameter: "learned" is one for each of `length` positions, digits are their
        number.

        Args:
          others: further known names, for the error.

        Raises:
          UserError: neither a name nor a number.
        """
        if positions == "learned":
            return cls(length)
        if not (positions.isascii() and positions.isdigit() and int(positions)):
            known = ", ".join(("learned", *others))
            raise UserError(
                f"positions={positions!r}: write {known}, or the number of learned positions, e.g. 2048"
            )
        return cls(int(positions))

    def table(self, graph: Builder, d_model: Dim, dtype: str = "float32") -> Tensor:
        """A new variable [positions, d_model]."""
        with graph.scope(self.name):
            dims = [Dim("positions", self.count), d_model]
            return graph.variable("positions", dims, Normal(self.stddev), activation_dtype=dtype)

    def __call__(self, x: Tensor, table: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """x [others, length, d_model] plus the first positions of the table (by default a new one).

        Args:
          cache: of a text that grows (see `decoding`); at a position, x is [others, d_model].
        """
        if one_of_all(cache):
            table = self.table(x.graph, x.dim(self.d_model), x.dtype) if table is None else table
            at = cache.position + self.first if self.first else cache.position
            return x + dynamic_slice(table, at, "positions")
        size = x.dim(self.length).size
        if self.count < (end := self.first + size):
            raise UserError(
                f"LearnedPositions: count={self.count} is less than {self.length}={end}; increase count to "
                f"at least {end}"
            )
        if table is None:
            table = self.table(x.graph, x.dim(self.d_model), x.dtype)
        return x + rename(slice_dim(table, "positions", self.first, size), positions=self.length)

"""Vocabularies in clusters of equally frequent tokens: rare tokens have few features, and their probabilities
are only computed where they occur. Distributions over a vocabulary that one softmax of a product cannot
express."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import project
from mesh_tf_core.ops.along import put_along
from mesh_tf_core.ops.basic import add_n, cast
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.cumulative import cumsum
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.index import gather, one_hot, pick
from mesh_tf_core.ops.math import greater_equal, sigmoid, tanh
from mesh_tf_core.ops.shape import concat, pad, rename
from mesh_tf_core.ops.softmax import log_softmax, logsumexp, softmax_cross_entropy
from mesh_tf_core.ops.stacking import stack, unstack
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class VocabularyCluster:
    """Tokens that follow each other in the vocabulary.

    Attributes:
      count: how many.
      width: features of each; 0 means as many as the model.
      share: share of a text's positions that can have such tokens when `AdaptiveSoftmax` computes a loss;
        tokens beyond it have loss 0. Not used of the first cluster.
    """

    count: int
    width: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.width < 0 or not 0 < self.share <= 1:
            raise UserError(
                f"{self}: count must be at least 1, width at least 0, and share more than 0 and at most 1"
            )


EmbeddingTable = tuple[Tensor, Tensor | None]
"""The weights of a cluster: [vocab_i, width or d_model], and [width, d_model] unless it is as wide as the
model."""


@dataclass(frozen=True)
class AdaptiveEmbedding:
    """Tables of several widths, mapped to one (Baevski & Auli 2019, "Adaptive input representations",
    section 3). With one cluster it is a factorised table (Lan et al. 2020, "ALBERT", section 3.1).

    The tokens of cluster i have a separate dimension, `<vocab>_<i>`, which may be split; if logits of the
    whole vocabulary are split, every cluster must be divisible. The tables are made by `tables`, so that
    inputs and outputs can share them.

    Attributes:
      clusters: in the order of the ids; they add up to the vocabulary.
      vocab: name of the vocabulary, of ids and of the logits.
      dtype, stddev: as of `Embedding`.
    """

    clusters: tuple[VocabularyCluster, ...]
    d_model: Dim
    vocab: str = "vocab"
    dtype: str = "float32"
    stddev: float = 0.02
    name: str = "embedding"

    def __post_init__(self) -> None:
        if not self.clusters:
            raise UserError("AdaptiveEmbedding: `clusters` must have at least one cluster")

    @property
    def starts(self) -> list[int]:
        """The first id of every cluster, and the size of the vocabulary."""
        return [sum(c.count for c in self.clusters[:i]) for i in range(len(self.clusters) + 1)]

    def dim(self, i: int) -> Dim:
        """The tokens of cluster i."""
        return Dim(f"{self.vocab}_{i}", self.clusters[i].count)

    def tables(self, graph: Graph) -> tuple[EmbeddingTable, ...]:
        """New variables."""
        with graph.scope(self.name):
            return tuple(self._table(graph, i, c) for i, c in enumerate(self.clusters))

    def _table(self, graph: Graph, i: int, cluster: VocabularyCluster) -> EmbeddingTable:
        def weight(name: str, dims: Sequence[Dim], stddev: float) -> Tensor:
            return graph.variable(f"{name}_{i}", dims, Normal(stddev), activation_dtype=self.dtype)

        if not cluster.width:
            return weight("tokens", [self.dim(i), self.d_model], self.stddev), None
        width = Dim(f"width_{i}", cluster.width)
        tokens = weight("tokens", [self.dim(i), width], self.stddev)
        return tokens, weight("up", [width, self.d_model], 1 / math.sqrt(width.size))

    def __call__(self, tables: Sequence[EmbeddingTable], ids: Tensor) -> Tensor:
        """ids [others] -> [others, d_model]; zeros for ids outside of the vocabulary."""
        found = []
        with ids.graph.scope(self.name):
            for i, ((tokens, up), start) in enumerate(zip(tables, self.starts, strict=False)):
                # Ids of other clusters are outside of this table, where a look-up gives zeros.
                row = gather(tokens, ids - start, self.dim(i))
                found.append(row if up is None else einsum([row, up], [*ids.shape, self.d_model]))
            return add_n(found)

    def logits(self, x: Tensor, tables: Sequence[EmbeddingTable]) -> Tensor:
        """[others, d_model] -> [others, vocab], for an ordinary softmax."""
        with x.graph.scope("output"):
            parts = [self.part(x, tables, i) for i in range(len(self.clusters))]
            named = [rename(p, **{self.dim(i).name: self.vocab}) for i, p in enumerate(parts)]
            return concat(named, self.vocab)

    def part(self, x: Tensor, tables: Sequence[EmbeddingTable], i: int) -> Tensor:
        """[others, d_model] -> logits of cluster i [others, vocab_i]."""
        tokens, up = tables[i]
        others = x.shape.without(self.d_model.name)
        if up is not None:
            x = einsum([x, up], [*others, up.shape.dims[0]])
        return einsum([x, tokens], [*others, self.dim(i)])


@dataclass(frozen=True)
class AdaptiveSoftmax:
    """p(token) = p(cluster) p(token | cluster); the first cluster's tokens and the other clusters share one
    softmax (Grave et al. 2017, "Efficient softmax approximation for GPUs", section 4).

    Every cluster may be split over the mesh; none is gathered. If a cluster has a `share`, its logits are
    computed only for that share of the positions of `length`, those with targets in the cluster.

    Attributes:
      embedding: of at least two clusters, the first with the most frequent tokens.
      length: name of the positions of a text.
    """

    embedding: AdaptiveEmbedding
    length: str = "length"
    name: str = "adaptive_softmax"

    def __post_init__(self) -> None:
        if len(self.embedding.clusters) < 2:
            raise UserError(
                "AdaptiveSoftmax: the embedding must have at least two clusters; for a single one, use "
                "CrossEntropy"
            )

    @property
    def _tails(self) -> range:
        return range(1, len(self.embedding.clusters))

    def loss(self, x: Tensor, tables: Sequence[EmbeddingTable], targets: Tensor) -> Tensor:
        """x [others, length, d_model], targets int32 [others, length] -> -log p(target), float32."""
        starts = self.embedding.starts
        with x.graph.scope(self.name):
            head, clusters, total = self._head(x, tables)
            cluster = add_n([greater_equal(targets, starts[i]).cast("int32") for i in self._tails]) - 1
            chosen = pick(head, targets, self.embedding.dim(0)) + pick(clusters, cluster, "clusters")
            return add_n([total - chosen, *(self._tail_loss(x, tables, targets, i) for i in self._tails)])

    def log_probabilities(self, x: Tensor, tables: Sequence[EmbeddingTable]) -> Tensor:
        """[others, d_model] -> log p [others, vocab], float32."""
        vocab = self.embedding.vocab
        with x.graph.scope(self.name):
            head, clusters, total = self._head(x, tables)
            parts = [rename(head - total, **{self.embedding.dim(0).name: vocab})]
            for i, cluster in zip(self._tails, unstack(clusters, "clusters"), strict=True):
                inside = log_softmax(_wide(self.embedding.part(x, tables, i)), self.embedding.dim(i))
                parts.append(rename(inside + (cluster - total), **{self.embedding.dim(i).name: vocab}))
            return concat(parts, vocab)

    def _head(self, x: Tensor, tables: Sequence[EmbeddingTable]) -> tuple[Tensor, Tensor, Tensor]:
        """Float32 logits of the first cluster's tokens [others, vocab_0] and of the other clusters [others,
        clusters], and the logarithm of the sum over both of their exponentials [others]."""
        d, tails = self.embedding.d_model, Dim("clusters", len(self.embedding.clusters) - 1)
        head = _wide(self.embedding.part(x, tables, 0))
        clusters = _wide(project(x, "clusters", [d], [tails]))
        return head, clusters, logsumexp(head, self.embedding.dim(0), logsumexp(clusters, tails))

    def _tail_loss(self, x: Tensor, tables: Sequence[EmbeddingTable], targets: Tensor, i: int) -> Tensor:
        """-log p(target | cluster i) where the target is in it, else 0."""
        e, start = self.embedding, self.embedding.starts[i]
        inside = (targets >= start) & (targets < self.embedding.starts[i + 1])
        cluster, length = e.clusters[i], targets.dim(self.length)
        if cluster.share == 1:
            loss = softmax_cross_entropy(e.part(x, tables, i), targets - start, e.dim(i))
            return where(inside, loss, 0.0)
        slot = Dim(f"slot_{i}", math.ceil(cluster.share * length.size))
        place = where(inside, cumsum(inside.cast("int32"), length, exclusive=True), slot.size)
        others = targets.shape.without(length.name)
        here = one_hot(place, slot, x.dtype)
        few = einsum([here, x], [*others, slot, e.d_model], chooses=True)
        # A slot that stays empty has the cluster's first target, and no weight on the way back.
        ids = put_along(where(inside, targets - start, 0), place, slot, others.names)
        loss = softmax_cross_entropy(e.part(few, tables, i), ids, e.dim(i))
        return einsum([here.cast(loss.dtype), loss], Shape(targets.shape), chooses=True)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == "float64" else cast(x, "float32")


def _contexts(x: Tensor, d_model: str, kinds: Dim, bias: bool = False) -> Tensor:
    """tanh of x mapped to [others, kinds, d_model]."""
    d = x.dim(d_model)
    inner = rename(x, **{d.name: f"{d.name}_in"})
    y = project(inner, "context", [inner.dim(f"{d.name}_in")], [kinds, d])
    if bias:
        y = y + x.graph.variable("context_bias", [kinds, d], ZEROS, activation_dtype=x.dtype)
    return tanh(y)


@dataclass(frozen=True)
class MixtureOfSoftmaxes:
    """p = sum over components of prior(x) softmax(tanh(x W) table) (Yang et al. 2018, "Breaking the softmax
    bottleneck", equation 2).

    Attributes:
      components: number of softmaxes.
      d_model: name of x's features.
    """

    components: int
    d_model: str = "d_model"
    name: str = "mixture_of_softmaxes"

    def __post_init__(self) -> None:
        if self.components < 1:
            raise UserError(f"MixtureOfSoftmaxes: components must be positive, found {self.components}")

    def __call__(self, x: Tensor, table: Tensor) -> Tensor:
        """x [others, d_model], table [vocab, d_model] -> log p [others, vocab], float32."""
        (vocab,) = table.shape.without(self.d_model)
        prior, logits = self._parts(x, table)
        return logsumexp(prior + log_softmax(cast(logits, "float32"), vocab), "components")

    def loss(self, x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
        """-log p(target) [others], float32; targets are int32 [others]. No distribution is made."""
        (vocab,) = table.shape.without(self.d_model)
        prior, logits = self._parts(x, table)
        every = broadcast(targets, prior.shape)
        return -logsumexp(prior - softmax_cross_entropy(logits, every, vocab), "components")

    def _parts(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the priors [others, components] and logits [others, components, vocab]."""
        d, kinds = x.dim(self.d_model), Dim("components", self.components)
        others = x.shape.without(d.name)
        (vocab,) = table.shape.without(d.name)
        with x.graph.scope(self.name):
            prior = log_softmax(cast(project(x, "prior", [d], [kinds]), "float32"), kinds)
            return prior, einsum([_contexts(x, d.name, kinds), table], [*others, kinds, vocab])


@dataclass(frozen=True)
class Mixtape:
    """Logits that are the mean, gated per token, of the logits of four contexts, with one softmax instead of
    four (Yang et al. 2019, "Mixtape", sections 3.2 to 3.4). Rare tokens share their gates.

    Attributes:
      gate_width: features that gates are made from.
      frequent: number of tokens, from the first on, with gates of their own.
      d_model: name of x's features.
    """

    gate_width: int
    frequent: int
    d_model: str = "d_model"
    name: str = "mixtape"

    def __post_init__(self) -> None:
        if self.gate_width < 1 or self.frequent < 1:
            raise UserError(
                f"Mixtape: gate_width and frequent must be positive, found gate_width={self.gate_width}, "
                f"frequent={self.frequent}"
            )

    def __call__(self, x: Tensor, table: Tensor) -> Tensor:
        """x [others, d_model], table [vocab, d_model] -> logits [others, vocab]."""
        d, gates = x.dim(self.d_model), Dim("gates", 4)
        others = x.shape.without(d.name)
        (vocab,) = table.shape.without(d.name)
        if self.frequent >= vocab.size:
            raise UserError(
                f"Mixtape: frequent={self.frequent} must be less than the size of {vocab.name!r}, "
                f"{vocab.size}"
            )
        with x.graph.scope(self.name):
            logits = einsum([_contexts(x, d.name, gates, bias=True), table], [*others, gates, vocab])
            return einsum([logits, self._gates(x, vocab)], [*others, vocab])

    def _gates(self, x: Tensor, vocab: Dim) -> Tensor:
        """[others, vocab, gates], which add up to 1 over the gates: a tree of sigmoids (section 3.3)."""
        g, d, turns = x.graph, x.dim(self.d_model), Dim("turns", 3)
        width, some = Dim("gate_width", self.gate_width), Dim("frequent", self.frequent)
        others = x.shape.without(d.name)

        def weight(name: str, dims: list[Dim], stddev: float = 0.0) -> Tensor:
            return g.variable(name, dims, Normal(stddev), activation_dtype=x.dtype)

        made = tanh(project(x, "gates", [d], [turns, width]) + weight("gates_bias", [turns, width]))
        shared = project(x, "shared", [d], [turns])
        own = einsum([made, weight("tokens", [some, width], self.gate_width**-0.5)], [*others, some, turns])
        own = pad(own + weight("tokens_bias", [some, turns]), some, 0, vocab.size - some.size)
        first, left, right = unstack(sigmoid(rename(own, frequent=vocab.name) + shared), turns)
        leaves = [first * left, first * (1.0 - left), (1.0 - first) * right, (1.0 - first) * (1.0 - right)]
        return stack(leaves, "gates", len(leaves[0].shape))

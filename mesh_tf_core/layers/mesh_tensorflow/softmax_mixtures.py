"""Distributions over a vocabulary that one softmax of a product cannot express."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import project
from mesh_tf_core.ops.basic import cast
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.math import sigmoid, tanh
from mesh_tf_core.ops.shape import pad, rename
from mesh_tf_core.ops.softmax import log_softmax, logsumexp, softmax_cross_entropy
from mesh_tf_core.ops.stacking import stack, unstack


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

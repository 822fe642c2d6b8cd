"""Inputs of a layer besides its own: tensors that earlier layers keep for it, and an embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from layoutopt.importers.huggingface.forms import Norm, ScaledLatentAttention, SelfAttention
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ONES
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Given
from mesh_tf_core.layers.base import activation, project
from mesh_tf_core.ops.norm import rms_norm

KeptTensors = dict[str, tuple[Tensor, ...]]
"""Tensors that layers keep for later ones, by name."""


@dataclass(frozen=True)
class SharingAttention(SelfAttention):
    """Attention that keeps its keys and values for later layers, or reads those of an earlier one (Gemma 4).

    Attributes:
      keeps, reads: their name in `store`; "": it does not.
    """

    keeps: str = ""
    reads: str = ""
    store: KeptTensors = field(default_factory=dict, compare=False, repr=False)

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        turn = self.rotary
        with x.graph.scope(self.name):
            if self.reads:
                q, (k, v) = self.queries(x), self.store[self.reads]
            else:
                q, k, v = self.projections(x, self.memory_of(x, None))
                k = k if turn is None else turn(k, self.memory_length, self.d_kv.name)
                self.store[self.keeps] = k, v
            q = q if turn is None else turn(q, self.length, self.d_kv.name)
            return self.joined(self.attended(q, k, v, x, given.mask, given.bias, given.segments), x)


def share_keys(mixers: Sequence[Any], kinds: Sequence[str], last: int) -> Iterator[Any]:
    """The mixers of layers: the `last` ones read keys and values of the last of their kind before them."""
    first = len(mixers) - last
    before = kinds[:first]
    keepers = {kind: first - 1 - before[::-1].index(kind) for kind in set(kinds[first:]) if kind in before}
    for i, (mixer, kind) in enumerate(zip(mixers, kinds, strict=True)):
        role = "reads" if i >= first else "keeps" if keepers.get(kind) == i else ""
        same: dict[str, Any] = {f.name: getattr(mixer, f.name) for f in fields(mixer)}
        yield SharingAttention(**same | {role: kind}) if role else mixer


def share_masks(mixers: Sequence[ScaledLatentAttention], types: Sequence[Any]) -> Iterator[Any]:
    """The mixers of layers: a "shared" one sees the keys that the last other one chose (GLM-5.2)."""
    for mixer, own, after in zip(mixers, types, [*types[1:], ""], strict=True):
        if own == "shared":
            yield replace(mixer, indexer=None, reads="mask")
        else:
            yield replace(mixer, keeps="mask") if after == "shared" else mixer


def at_once(period: Sequence[Any]) -> bool:
    """True unless a layer reads what a later one of the same period keeps: an earlier turn's."""
    keeps, reads = _names(period, "keeps"), _names(period, "reads")
    return not any(name and name in keeps[i:] and name not in keeps[:i] for i, name in enumerate(reads))


def needed(period: Sequence[Any], later: Sequence[Any]) -> list[str]:
    """Names that the layers of a period keep and one of the later layers reads before another keeps it."""
    keeps, reads = _names(later, "keeps"), _names(later, "reads")
    own = dict.fromkeys(filter(None, _names(period, "keeps")))
    return [n for n in own if n in reads and n not in keeps[: reads.index(n)]]


def _names(layers: Sequence[Any], role: str) -> list[str]:
    """The name that each layer keeps, or reads."""
    return [getattr(layer.mixer, role, "") for layer in layers]


@dataclass(frozen=True)
class LayerEmbedding:
    """A second embedding of tokens, of each layer its own, and a map of the first one. A gate lets them into
    the layer's result (Gemma 4 E2B and E4B).

    Attributes:
      vocab, own: of an embedding.
    """

    vocab: Dim
    own: Dim
    activation: str
    norm: Norm

    def given(self, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, ...]:
        """Inputs of every layer: tokens and their first embedding, and the scale of its norm."""
        with tokens.graph.scope("own_norm"):
            scale = tokens.graph.variable("scale", [self.own], ONES, activation_dtype=embedded.dtype)
        return tokens, embedded, scale

    def __call__(self, x: Tensor, tokens: Tensor, embedded: Tensor, scale: Tensor) -> Tensor:
        """[batch, length, d_model], and what `given` gives -> the same."""
        d, own = x.dim("d_model"), self.own
        with x.graph.scope("own"):
            embedding = nn.Embedding(self.vocab, own, x.dtype)
            found = embedding(embedding.table(x.graph), tokens) * own.size**0.5
            mapped = project(embedded, "map", [d], [own]) * d.size**-0.5
            both = (rms_norm(mapped, own, scale, self.norm.epsilon) + found) * 2**-0.5
            gate = activation(self.activation)(project(x, "gate", [d], [own]))
            return self.norm(project(gate * both, "out", [own], [d]), "after_norm")

"""Decoder-only language models: the content of their configurations, and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mesh_tf_core as mtf
from layoutopt.importers.huggingface.forms import Mixture, Norm, within
from layoutopt.importers.huggingface.sharing import KeptTensors, LayerEmbedding, at_once, needed, of_last
from layoutopt.importers.huggingface.training import ConfiguredTraining
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ZEROS, Initializer, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.scan import scan

LONGEST_PERIOD = 16
"""Layers after which kinds of layers may repeat."""
LayerBlock = Callable[..., Any]
"""[batch, length, d_model] -> the same, or (the same, a router's loss)."""


@dataclass(frozen=True)
class LayerKind:
    """A layer's blocks: attention (or a state space), and a feed-forward block; None: no such block.

    Attributes:
      kept, added: factors of a block's input and of its result where they are added, of both blocks.
      bare: attention has no norm before it.
    """

    mixer: LayerBlock | None
    feed_forward: LayerBlock | None = None
    kept: tuple[float, float] = (1.0, 1.0)
    added: tuple[float, float] = (1.0, 1.0)
    bare: bool = False

    def within(self, length: int) -> LayerKind:
        """The layer for texts of this length."""
        return replace(self, mixer=within(self.mixer, length))


PLACES = ("before", "after", "both", "parallel", "beside", "carried")
"""Where norms stand: before blocks; after them; on both sides; one before two parallel blocks, or one before
each of them; before, where results are added to what is normalised (MiniMax)."""


@dataclass(frozen=True)
class LanguageModel:
    """A language model.

    Attributes:
      norm: of blocks; place: where it stands (`PLACES`).
      tied, head_bias: of the projection to the vocabulary.
      times, logits: factors of embeddings and of the vocabulary's logits; final_cap: their bound (0: none).
      stddev: of initial weights.
      masked: "", or the activation of a transformation before the logits of a model of masked tokens;
        its embeddings are normalised, and targets below 0 do not count (ModernBERT). mask_bias: of that.
      remarks: where the model is not what its family publishes, in words.
      own: an embedding of every layer; None: there is none.
    """

    layers: tuple[LayerKind, ...]
    vocab: int
    d_model: int
    norm: Norm
    tied: bool
    stddev: float
    place: str = "before"
    head_bias: bool = False
    final_cap: float = 0.0
    times: float = 1.0
    logits: float = 1.0
    remarks: tuple[str, ...] = ()
    masked: str = ""
    mask_bias: bool = False
    own: LayerEmbedding | None = None

    @property
    def mixtures(self) -> int:
        """The number of layers with a mixture of experts."""
        return sum(isinstance(layer.feed_forward, Mixture) for layer in self.layers)

    def model(self, name: str, training: ConfiguredTraining) -> Model:
        """The model; its batches are `tokens` and `targets` [batch, length]."""
        g = training.graph(name)
        text = [Dim("batch", training.batch), Dim("length", training.length)]
        tokens, targets = g.input("tokens", text), g.input("targets", text)
        vocab = Dim("vocab", self.vocab)
        embedding = nn.Embedding(vocab, Dim("d_model", self.d_model), training.dtype)
        with g.initialized(initial(self.stddev)):
            table = embedding.table(g)
            x = embedding(table, tokens)
            x = x if self.times == 1 else x * self.times
            x = self.norm(x, "embedding_norm") if self.masked else x
            carry: tuple[Tensor, ...] = (
                (x, mtf.reduce_sum(targets.cast("float32") * 0.0)) if training.balance else (x,)
            )
            first, seen = 0, self.seen(training.length)
            kept: KeptTensors = {"own": self.own.given(tokens, x)} if self.own else {}
            for number, (period, count) in enumerate(runs(seen)):
                end = first + count * len(period)
                carry = self._stack(carry, period, count, number, first, kept, needed(period, seen[end:]))
                first = end
            x, *unbalance = carry
            x = self.norm(x, "final_norm")
            if self.masked:
                made = nn.Dense((x.dim("d_model"),), ("d_hidden",), self.mask_bias, self.masked, "transform")
                x = self.norm(made(mtf.rename(x, d_model="d_hidden")), "transform_norm")
            logits = embedding.logits(x, table if self.tied else None)
            if self.head_bias:
                with g.scope("output"):
                    logits = logits + g.variable("bias", [vocab], ZEROS, activation_dtype=training.dtype)
        logits = logits if self.logits == 1 else logits * self.logits
        if self.final_cap:
            logits = mtf.tanh(logits * (1 / self.final_cap)) * self.final_cap
        entropy = mtf.softmax_cross_entropy(logits, targets, vocab)
        if self.masked:
            counted = (targets >= 0).cast("float32")
            entropy = mtf.reduce_sum(entropy * counted) / mtf.reduce_sum(counted)
        else:
            entropy = mtf.reduce_mean(entropy)
        if not unbalance:
            return training.model(entropy, name, text)
        mean = unbalance[0] * (1.0 / max(1, self.mixtures))
        metrics = {"cross_entropy": entropy, "unbalance": mean}
        return training.model(entropy + mean * training.balance, name, text, metrics)

    def seen(self, length: int) -> tuple[LayerKind, ...]:
        """The layers for texts of this length."""
        return tuple(layer.within(length) for layer in self.layers)

    def _stack(
        self,
        carry: tuple[Tensor, ...],
        period: Sequence[LayerKind],
        count: int,
        number: int,
        first: int,
        kept: KeptTensors,
        later: Sequence[str],
    ) -> tuple[Tensor, ...]:
        """`count` times the layers of a period, as one loop; `first`: the number of its first layer; `later`:
        what other loops read, which it puts into `kept`."""
        g, name = carry[0].graph, "layers" if not number else f"layers_{number}"
        deep = any(isinstance(layer.mixer, nn.LightningAttention) for layer in period)
        turns = mtf.mtf_range(g, Dim(name, count))

        names: list[str] = []

        def body(carry: tuple[Tensor, ...], *turn: Tensor) -> Any:
            inside = dict(kept)
            for place, layer in enumerate(period):
                depth = [t * len(period) + (first + place) for t in turn]
                if len(period) == 1:
                    carry = self._layer(layer, carry, depth, inside)
                else:
                    with carry[0].graph.scope(f"layer_{place}"):
                        carry = self._layer(layer, carry, depth, inside)
            names.extend(n for n in later for _ in inside[n])
            return (carry, [t for n in later for t in inside[n]]) if later else carry

        with g.scope(name):
            made = scan(body, carry, Dim(name, count), [turns] if deep else [])
        carry, every = made if later else (made, ())
        kept.update(dict.fromkeys(later, ()))
        for n, stacked in zip(names, every, strict=False):
            kept[n] = (*kept[n], of_last(stacked, Dim(name, count)))
        return carry

    def _layer(
        self, layer: LayerKind, carry: tuple[Tensor, ...], depth: Sequence[Tensor], store: KeptTensors
    ) -> tuple[Tensor, ...]:
        x, *losses = carry
        entered = x
        for block, kept, added in zip(
            (layer.mixer, layer.feed_forward), layer.kept, layer.added, strict=True
        ):
            if block is None:
                continue
            name = "feed_forward" if block is layer.feed_forward else "attention"
            first = block is layer.mixer or layer.mixer is None
            if self.place == "parallel":
                y = entered = self.norm(x, "attention_norm") if first else entered
            else:
                bare = self.place == "after" or (layer.bare and first)
                seen = entered if self.place == "beside" else x
                y = seen if bare else self.norm(seen, f"{name}_norm")
            x = y if self.place == "carried" else x
            deep = isinstance(block, nn.LightningAttention)
            ready: Any = block
            ready = replace(ready, store=store) if hasattr(block, "store") else block
            found = ready(y, *(depth if deep else [x] if getattr(block, "raw", False) else []))
            y, *more = found if isinstance(found, tuple) else (found,)
            losses = [before + loss for before, loss in zip(losses, more, strict=False)] if more else losses
            if self.place in ("after", "both"):
                y = self.norm(y, f"{name}_after_norm")
            x = (x if kept == 1 else x * kept) + (y if added == 1 else y * added)
        return (x if self.own is None else x + self.own(x, *store["own"])), *losses


def runs(layers: tuple[LayerKind, ...]) -> Iterator[tuple[tuple[LayerKind, ...], int]]:
    """Layers as loops: a period of layers and how often it repeats, the longest stretch first."""
    at = 0
    while at < len(layers):
        best, most = (1, 1), 1
        for period in range(1, min(LONGEST_PERIOD, len(layers) - at) + 1):
            count = 1
            while layers[at + count * period : at + (count + 1) * period] == layers[at : at + period]:
                count += 1
            whole = (count > 1 or period == 1) and at_once(layers[at : at + period])
            covers = period * count if whole else 0
            if covers > most:
                best, most = (period, count), covers
        yield layers[at : at + best[0]], best[1]
        at += best[0] * best[1]


def initial(stddev: float) -> Callable[[str, Initializer], Initializer]:
    """Normal initial weights of a standard deviation."""
    return lambda name, found: Normal(stddev) if isinstance(found, Normal) else found

"""Decoder-only language models: the content of their configurations, and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import mesh_tf_core as mtf
from layoutopt.importers.huggingface.fields import ConfiguredTraining
from layoutopt.importers.huggingface.forms import BesideExperts, Mixture, Norm, within
from layoutopt.importers.huggingface.sharing import KeptTensors, LayerEmbedding, at_once, needed
from mesh_tf_core import layers as nn
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ZEROS, Constant, Initializer, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import project
from mesh_tf_core.layers.recurrent import Recurrence
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.scan import scan

MIXED = Mixture, BesideExperts
ALONE = "alone"
"""A model of masked tokens without a transformation."""
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
      cross: attention to the memory, between them.
    """

    mixer: LayerBlock | None
    feed_forward: LayerBlock | None = None
    kept: tuple[float, float] = (1.0, 1.0)
    added: tuple[float, float] = (1.0, 1.0)
    bare: bool = False
    cross: LayerBlock | None = None

    def within(self, length: int) -> LayerKind:
        """The layer for texts of this length."""
        return replace(self, mixer=within(self.mixer, length))

    @property
    def blocks(self) -> Iterator[tuple[str, LayerBlock, float, float]]:
        """Their names, and factors of their inputs and results."""
        every = (self.mixer, self.cross, self.feed_forward)
        for name, block in zip(("attention", "cross_attention", "feed_forward"), every, strict=True):
            if block is not None:
                last = block is self.feed_forward
                yield name, block, self.kept[last], self.added[last]


PLACES = ("before", "after", "both", "parallel", "beside", "carried", "summed")
"""Where norms stand: before blocks; after them; on both sides; one before two parallel blocks, or one before
each of them; before, where results are added to what is normalised (MiniMax); behind the sums (BERT)."""


@dataclass(frozen=True)
class LanguageModel:
    """A language model.

    Attributes:
      norm: of blocks; place: where it stands (`PLACES`); final: there is one behind the last layer.
      tied, head_bias: of the projection to the vocabulary.
      times, logits: factors of embeddings and of the vocabulary's logits; final_cap: their bound (0: none).
      stddev: of initial weights. remarks: where the model is not what its family publishes, in words.
      masked: "", or the activation of a transformation before the logits of a model of masked tokens, where
        targets below 0 do not count; `ALONE`: no transformation. mask_bias: of that.
      own: an embedding of every layer; None: there is none.
      positions, segments: what is added to embeddings: of positions, and of so many kinds of segments.
      normed: embeddings are normalised. small: their size, from which they (in models of masked tokens with
        their positions) are mapped to d_model; 0: that.
      rates: of dropout, of embeddings and of blocks' results.
      relative: biases of attention, which all layers share, or `each` has its own.
      repeated: all layers are one (ALBERT).
      encoder: of the text that the decoder attends to; side: begins the names of its loops over layers.
      speech: what comes before an encoder's layers in place of an embedding.
      scaled: blocks' results are multiplied by learned scales, at first this; 0: they are not (DINOv2).
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
    positions: nn.LearnedPositions | nn.Sinusoids | None = None
    segments: int = 0
    normed: bool = False
    small: int = 0
    rates: tuple[float, float] = (0.0, 0.0)
    relative: nn.RelativeBias | None = None
    each: bool = False
    repeated: bool = False
    final: bool = True
    encoder: LanguageModel | None = None
    side: str = ""
    speech: Callable[..., Tensor] | None = None
    scaled: float = 0.0

    @property
    def width(self) -> Dim:
        """The dimension of what layers see."""
        return Dim("d_model", self.d_model)

    @property
    def mixtures(self) -> int:
        """The number of layers with a mixture of experts."""
        return sum(isinstance(layer.feed_forward, MIXED) for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        """True if layers have states, alone or beside attention."""
        blocks = [b for layer in self.layers for b in getattr(layer.mixer, "blocks", [(layer.mixer,)])]
        return any(isinstance(block, Recurrence) for block, *_ in blocks)

    def model(self, name: str, training: ConfiguredTraining) -> Model:
        """The model; its batches are `tokens` and `targets`, with an encoder `text` too, and with several
        kinds of segments `segments` [batch, length]."""
        g = training.graph(name)
        text = [Dim("batch", training.batch), Dim("length", training.length)]
        tokens, targets = g.input("tokens", text), g.input("targets", text)
        vocab = Dim("vocab", self.vocab)
        width = Dim("d_small", self.small) if self.small else self.width
        embedding = nn.Embedding(vocab, width, training.dtype)
        memory = None
        with g.initialized(initial(self.stddev)):
            table = embedding.table(g)
            if self.encoder is not None:
                with g.scope("encoder"):
                    if self.encoder.speech is None:
                        x = self.encoder.embedded(embedding, table, g.input("text", text))
                    else:
                        x = self.encoder.placed(self.encoder.speech(g, text[0], self.width, training.dtype))
                    (memory,) = self.encoder.hidden((x,), {})
            with g.scope("decoder") if memory is not None else nullcontext():
                kind = g.input("segments", text) if self.segments > 1 else None
                x = self.embedded(embedding, table, tokens, kind)
                kept: KeptTensors = {"own": self.own.given(tokens, x)} if self.own else {}
                begin = (mtf.reduce_sum(targets.cast("float32") * 0.0),) if training.balance else ()
                x, *unbalance = self.hidden((x, *begin), kept, memory)
            entropy = self._entropy(self._logits(embedding, table, x), targets, vocab)
            metrics = {"cross_entropy": entropy} if training.mtp or unbalance else {}
            loss = entropy
            for ahead in range(1, training.mtp + 1):
                x, *unbalance = self._further(embedding, table, (x, *unbalance), targets, ahead)
                with g.again():
                    logits = self._logits(embedding, table, x)
                later = self._entropy(logits, mtf.shift(targets, -ahead, "length"), vocab, ahead)
                loss = loss + later * (training.mtp_weight / training.mtp)
        if unbalance:
            mixtures = self.mixtures + training.mtp * isinstance(self._last.feed_forward, MIXED)
            metrics["unbalance"] = unbalance[0] * (1.0 / max(1, mixtures))
            loss = loss + metrics["unbalance"] * training.balance
        return training.model(loss, name, text, metrics or None)

    def _logits(self, embedding: nn.Embedding, table: Tensor, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, length, vocab]."""
        width = embedding.d_model
        if self.masked not in ("", ALONE):
            made = nn.Dense((width,), ("d_hidden",), self.mask_bias, self.masked, "transform")
            x = self.norm(made(mtf.rename(x, d_model="d_hidden")), "transform_norm", width.name)
        elif self.small:
            with x.graph.scope("output"):
                x = project(x, "map", [self.width], [width])
        logits = embedding.logits(x, table if self.tied else None)
        if self.head_bias:
            with x.graph.scope("output"):
                logits = logits + x.graph.variable("bias", [embedding.vocab], ZEROS, activation_dtype=x.dtype)
        logits = logits if self.logits == 1 else logits * self.logits
        return mtf.tanh(logits * (1 / self.final_cap)) * self.final_cap if self.final_cap else logits

    def _entropy(self, logits: Tensor, targets: Tensor, vocab: Dim, ahead: int = 0) -> Tensor:
        """The mean over the positions that count: not the `ahead` last ones."""
        entropy = mtf.softmax_cross_entropy(logits, targets, vocab)
        if self.masked:
            counted = (targets >= 0).cast("float32")
            return mtf.reduce_sum(entropy * counted) / mtf.reduce_sum(counted)
        if not ahead:
            return mtf.reduce_mean(entropy)
        length = targets.dim("length")
        if length.size <= ahead:
            raise UserError(f"mtp={ahead} needs texts of more than {ahead} tokens; length is {length.size}")
        counted = (mtf.mtf_range(logits.graph, length) < length.size - ahead).cast("float32")
        return mtf.reduce_mean(entropy * counted) * (length.size / (length.size - ahead))

    @property
    def _last(self) -> LayerKind:
        """The layer of further predictions: as the last one that has both blocks and reads no other layer's;
        where each layer has one, the last attention and the last of the others."""
        for layer in reversed(self.layers):
            if layer.mixer and layer.feed_forward and not getattr(layer.mixer, "reads", ""):
                return layer
        mixers = [each.mixer for each in self.layers if isinstance(each.mixer, nn.Attention)]
        return LayerKind(mixers[-1], [each.feed_forward for each in self.layers if each.feed_forward][-1])

    def _further(
        self, embedding: nn.Embedding, table: Tensor, carry: tuple[Tensor, ...], targets: Tensor, ahead: int
    ) -> tuple[Tensor, ...]:
        """The representations from which a token further on is predicted: a layer's of those before it, and
        of embeddings of the tokens that these predict (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2)."""
        if self.masked or self.encoder or self.positions or self.own or not self.final:
            raise UserError(f"mtp={ahead}: this family predicts one token at a time; remove mtp")
        inner = Dim("d_hidden", self.d_model)
        with targets.graph.scope(f"mtp_{ahead}"):
            tokens = self.embedded(embedding, table, mtf.shift(targets, 1 - ahead, "length"))
            x = [
                project(mtf.rename(self.norm(t, f"{n}_norm"), d_model="d_hidden"), n, [inner], [self.width])
                for n, t in (("tokens", tokens), ("hidden", carry[0]))
            ]
            one = replace(self, side=f"mtp_{ahead}_")
            layer = self._last.within(tokens.dim("length").size)
            carry = one._stack((x[0] + x[1], *carry[1:]), (layer,), 1, 0, len(self.layers), {}, ())
            return self.norm(carry[0], "final_norm"), *carry[1:]

    def embedded(
        self, embedding: nn.Embedding, table: Tensor, tokens: Tensor, kind: Tensor | None = None
    ) -> Tensor:
        """[batch, length] -> [batch, length, d_model]."""
        g, width = tokens.graph, embedding.d_model
        x = embedding(table, tokens)
        x = x if self.times == 1 else x * self.times
        if self.segments:
            kinds = Dim("segment_kinds", self.segments)
            with g.scope("embedding"):
                of = g.variable("segments", [kinds, width], Normal(0.02), activation_dtype=x.dtype)
            x = x + (mtf.reduce_sum(of, kinds) if kind is None else mtf.gather(of, kind, kinds))
        if not self.small:
            return self.placed(x, width)
        x = self.placed(x, width) if self.masked else x
        with g.scope("embedding"):
            x = project(x, "map", [width], [self.width], bool(self.masked))
        return x if self.masked else self.placed(x)

    def placed(self, x: Tensor, width: Dim | None = None) -> Tensor:
        """Embeddings with their positions, norm and dropout."""
        width = width or self.width
        x = x if self.positions is None else replace(self.positions, d_model=width.name)(x)
        return mtf.dropout(self.norm(x, "embedding_norm", width.name) if self.normed else x, self.rates[0])

    def hidden(
        self, carry: tuple[Tensor, ...], kept: KeptTensors, memory: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The layers' result of embeddings [batch, length, d_model], and of the routers' loss behind them;
        `memory`: of an encoder."""
        x = carry[0]
        if memory is not None:
            kept["memory"] = (mtf.rename(memory, length="memory_length"),)
        if self.relative is not None:
            length = x.dim("length")
            keys = mtf.mtf_range(x.graph, Dim("memory_length", length.size))
            mixer: Any = self.layers[0].mixer
            distance = keys - mtf.mtf_range(x.graph, length)
            kept["relative"] = (distance if self.each else self.relative(distance, mixer.head_dims, x.dtype),)
        first, seen = 0, self.seen(x.dim("length").size)
        for number, (period, count) in enumerate(runs(seen)):
            end = first + count * len(period)
            with x.graph.sharing() if self.repeated else nullcontext():
                carry = self._stack(carry, period, count, number, first, kept, needed(period, seen[end:]))
            first = end
        return (self.norm(carry[0], "final_norm"), *carry[1:]) if self.final else carry

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
        loop = Dim(self.side + name, count)
        turns, names = mtf.mtf_range(g, loop), list[str]()

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
            made = scan(body, carry, loop, [turns] if deep else [])
        carry, every = made if later else (made, ())
        kept.update(dict.fromkeys(later, ()))
        for n, stacked in zip(names, every, strict=False):
            last = mtf.slice_dim(stacked, loop, count - 1, 1)
            kept[n] = (*kept[n], mtf.reshape(last, stacked.shape.without(loop.name)))
        return carry

    def _layer(
        self, layer: LayerKind, carry: tuple[Tensor, ...], depth: Sequence[Tensor], store: KeptTensors
    ) -> tuple[Tensor, ...]:
        x, *losses = carry
        entered = x
        for name, block, kept, added in layer.blocks:
            first = block is layer.mixer or layer.mixer is None
            if self.place == "parallel":
                y = entered = self.norm(x, "attention_norm") if first else entered
            else:
                bare = self.place in ("after", "summed") or (layer.bare and first)
                seen = entered if self.place == "beside" else x
                y = seen if bare else self.norm(seen, f"{name}_norm")
            x = y if self.place == "carried" else x
            deep = isinstance(block, nn.LightningAttention)
            ready: Any = block
            ready = replace(ready, store=store) if hasattr(block, "store") else block
            if block is layer.cross:
                found = ready(y, *store["memory"])
            elif block is layer.mixer and self.relative is not None:
                (bias,) = store["relative"]
                with x.graph.scope(name):
                    bias = self.relative(bias, ready.head_dims, x.dtype) if self.each else bias
                found = ready(y, bias=bias)
            else:
                found = ready(y, *(depth if deep else [x] if getattr(block, "raw", False) else []))
            y, *more = found if isinstance(found, tuple) else (found,)
            losses = [before + loss for before, loss in zip(losses, more, strict=False)] if more else losses
            if self.place in ("after", "both"):
                y = self.norm(y, f"{name}_after_norm")
            if self.scaled:
                begin = Constant(self.scaled)
                y = y * x.graph.variable(f"{name}_scale", [self.width], begin, activation_dtype=x.dtype)
            y = mtf.dropout(y if added == 1 else y * added, self.rates[1])
            x = (x if kept == 1 else x * kept) + y
            x = self.norm(x, f"{name}_norm") if self.place == "summed" else x
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

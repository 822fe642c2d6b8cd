"""Decoder-only language models of Llama's family: the content of their configurations, and the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from layoutopt.importers.huggingface.training import ConfiguredTraining
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ONES, ZEROS, Initializer, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.model import Model
from mesh_tf_core.ops.math import tanh
from mesh_tf_core.ops.norm import rms_norm
from mesh_tf_core.ops.reduce import reduce_mean, reduce_sum
from mesh_tf_core.ops.softmax import softmax_cross_entropy
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.scan import scan

LONGEST_PERIOD = 12
"""Layers after which kinds of layers may repeat."""


@dataclass(frozen=True)
class LayerKind:
    """The properties in which layers of one model differ.

    Attributes:
      rotary: how positions turn queries and keys; None: not at all.
      window: positions back that a query sees; 0: all.
      experts: whether its feed-forward block is a mixture.
    """

    rotary: nn.Rotary | None
    window: int = 0
    experts: bool = False


@dataclass(frozen=True)
class Mixture:
    """A layer's experts.

    Attributes:
      count, d_ff: number of experts, and hidden size of one.
      router: chooses them; training gives it a capacity and an imbalance.
      shared: hidden size of shared experts, which every token passes through; 0: none.
    """

    count: int
    d_ff: int
    router: nn.TopExperts
    shared: int = 0


@dataclass(frozen=True)
class Latent:
    """Keys and values of low rank (`nn.LatentAttention`).

    Attributes:
      kv_rank, q_rank: of keys and values, and of queries (0: none).
      d_rotary, d_v: elements of a key with positions, and of a value.
    """

    kv_rank: int
    q_rank: int
    d_rotary: int
    d_v: int


@dataclass(frozen=True)
class Norm:
    """Root mean square 1 along a dimension, times a learned scale; Gemma's (`around_one`) stores the scale
    minus 1."""

    epsilon: float
    around_one: bool = False

    def __call__(self, x: Tensor, name: str, dim: str = "d_model") -> Tensor:
        with x.graph.scope(name):
            begin = ZEROS if self.around_one else ONES
            scale = x.graph.variable("scale", [x.dim(dim)], begin, activation_dtype=x.dtype)
            return rms_norm(x, dim, scale + 1.0 if self.around_one else scale, self.epsilon)


@dataclass(frozen=True)
class NormedAttention(nn.Attention):
    """Attention with normalised queries and keys (`norm`), another scale of its logits, and logits bounded by
    cap tanh(logits / cap), which no kernel does, so that attention is then written out."""

    norm: Norm | None = None
    scale: float = 0.0
    cap: float = 0.0
    biased: ClassVar[bool] = True

    @property
    def fused(self) -> bool:
        return self.attention == "fused" and not self.cap

    def projections(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projections(x, memory)
        if self.norm is not None:
            q, k = self.norm(q, "q_norm", self.d_kv.name), self.norm(k, "k_norm", self.d_kv.name)
        usual = self.d_kv.size**-0.5
        return (q * (self.scale / usual) if self.scale and self.scale != usual else q), k, v

    def weights(self, logits: Tensor, mask: Tensor | None, memory: str) -> Tensor:
        capped = tanh(logits * (1 / self.cap)) * self.cap if self.cap else logits
        return super().weights(capped, mask, memory)


@dataclass(frozen=True)
class ScaledLatentAttention(nn.LatentAttention):
    """Latent attention with logits multiplied by `times`."""

    times: float = 1.0

    def queries(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        q = super().queries(x, position)
        return q if self.times == 1 else q * self.times


@dataclass(frozen=True)
class LanguageModel:
    """A language model.

    Attributes:
      d_kv: elements of a head; kv_heads: heads of keys and values.
      after: a block's output is normalised too, before it is added (Gemma 2 and 3).
      head_norm: queries and keys are normalised head by head.
      biases: of attention, as `nn.Attention`'s; mlp_bias: of feed-forward blocks.
      latent: latent attention, whose `scale` multiplies the usual scale; None: ordinary attention.
      scale: of attention's logits; cap, final_cap: bounds of these and of the vocabulary's (0: none).
      times: factor of embeddings.
      stddev: of initial weights.
    """

    layers: tuple[LayerKind, ...]
    vocab: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    d_kv: int
    norm: Norm
    activation: str
    tied: bool
    stddev: float
    after: bool = False
    head_norm: bool = False
    biases: str = "none"
    mlp_bias: bool = False
    scale: float = 0.0
    cap: float = 0.0
    final_cap: float = 0.0
    times: float = 1.0
    dropout: float = 0.0
    mixture: Mixture | None = None
    latent: Latent | None = None

    def model(self, name: str, training: ConfiguredTraining) -> Model:
        """The model; its batches are `tokens` and `targets` [batch, length]."""
        g = Graph(name)
        text = [Dim("batch", training.batch), Dim("length", training.length)]
        tokens, targets = g.input("tokens", text), g.input("targets", text)
        vocab = Dim("vocab", self.vocab)
        embedding = nn.Embedding(vocab, Dim("d_model", self.d_model), training.dtype)
        with g.initialized(self._initial):
            table = embedding.table(g)
            x = embedding(table, tokens)
            x = x if self.times == 1 else x * self.times
            carry: tuple[Tensor, ...] = (
                (x, reduce_sum(targets.cast("float32") * 0.0)) if training.balance else (x,)
            )
            for number, (period, count) in enumerate(runs(self.seen(training.length))):
                carry = self._stack(carry, period, count, number, training)
            x, *unbalance = carry
            logits = embedding.logits(self.norm(x, "final_norm"), table if self.tied else None)
        if self.final_cap:
            logits = tanh(logits * (1 / self.final_cap)) * self.final_cap
        entropy = reduce_mean(softmax_cross_entropy(logits, targets, vocab))
        if not unbalance:
            return training.model(entropy, name, text)
        mean = unbalance[0] * (1.0 / sum(layer.experts for layer in self.layers))
        metrics = {"cross_entropy": entropy, "unbalance": mean}
        return training.model(entropy + mean * training.balance, name, text, metrics)

    def _initial(self, name: str, found: Initializer) -> Initializer:
        return Normal(self.stddev) if isinstance(found, Normal) else found

    def seen(self, length: int) -> tuple[LayerKind, ...]:
        """The layers, where a window that a text fits into is none."""
        return tuple(replace(e, window=e.window if e.window < length else 0) for e in self.layers)

    def _stack(
        self,
        carry: tuple[Tensor, ...],
        period: Sequence[LayerKind],
        count: int,
        number: int,
        training: ConfiguredTraining,
    ) -> tuple[Tensor, ...]:
        """`count` times the layers of a period, as one loop."""

        def body(carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            for place, layer in enumerate(period):
                if len(period) == 1:
                    carry = self._layer(layer, carry, training)
                else:
                    with carry[0].graph.scope(f"layer_{place}"):
                        carry = self._layer(layer, carry, training)
            return carry

        name = "layers" if not number else f"layers_{number}"
        with carry[0].graph.scope(name):
            made: tuple[Tensor, ...] = scan(body, carry, Dim(name, count))
        return made

    def _layer(
        self, layer: LayerKind, carry: tuple[Tensor, ...], training: ConfiguredTraining
    ) -> tuple[Tensor, ...]:
        x, *losses = carry
        y = self._attention(layer, training)(self.norm(x, "attention_norm"))
        x = x + (self.norm(y, "attention_after_norm") if self.after else y)
        y = self.norm(x, "feed_forward_norm")
        if not layer.experts:
            y = self._feed_forward(y)
            return x + (self.norm(y, "feed_forward_after_norm") if self.after else y), *losses
        assert self.mixture is not None
        mixed, loss = self._experts(self.mixture, training)(y)
        return x + mixed, *(before + loss for before in losses)

    def _attention(self, layer: LayerKind, training: ConfiguredTraining) -> nn.Attention:
        heads, d_kv, latent = Dim("heads", self.heads), Dim("d_kv", self.d_kv), self.latent
        if latent is not None:
            assert layer.rotary is not None
            return ScaledLatentAttention(
                heads,
                d_kv,
                causal=True,
                dropout=self.dropout,
                attention=training.attention,
                kv_rank=Dim("kv_rank", latent.kv_rank),
                q_rank=Dim("q_rank", latent.q_rank) if latent.q_rank else None,
                d_rotary=latent.d_rotary,
                d_v=Dim("d_v", latent.d_v),
                positions=layer.rotary,
                times=self.scale,
            )
        return NormedAttention(
            heads,
            d_kv,
            self.kv_heads,
            causal=True,
            window=layer.window,
            rotary=layer.rotary,
            dropout=self.dropout,
            biases=self.biases,
            attention=training.attention,
            norm=self.norm if self.head_norm else None,
            scale=self.scale,
            cap=self.cap,
        )

    def _feed_forward(self, x: Tensor, d_ff: int = 0, name: str = "feed_forward") -> Tensor:
        inner = Dim("d_ff", d_ff or self.d_ff)
        with x.graph.scope(name):
            both = nn.DenseProduct((inner,), ("d_model",), (self.activation, "linear"), self.mlp_bias, "in")
            return nn.Dense((x.dim("d_model"),), ("d_ff",), self.mlp_bias, name="out")(both(x))

    def _experts(self, mixture: Mixture, training: ConfiguredTraining) -> nn.MixtureOfExperts:
        return nn.MixtureOfExperts(
            Dim("experts", mixture.count),
            Dim("d_expert", mixture.d_ff),
            replace(mixture.router, capacity_factor=training.capacity_factor, imbalance=training.imbalance),
            self.activation,
            gated=True,
            shared=Dim("d_ff", mixture.shared) if mixture.shared else None,
        )


def runs(layers: tuple[LayerKind, ...]) -> Iterator[tuple[tuple[LayerKind, ...], int]]:
    """Layers as loops: a period of layers and how often it repeats, the longest stretch first."""
    at = 0
    while at < len(layers):
        best, most = (1, 1), 1
        for period in range(1, min(LONGEST_PERIOD, len(layers) - at) + 1):
            count = 1
            while layers[at + count * period : at + (count + 1) * period] == layers[at : at + period]:
                count += 1
            covers = period * count if count > 1 or period == 1 else 0
            if covers > most:
                best, most = (period, count), covers
        yield layers[at : at + best[0]], best[1]
        at += best[0] * best[1]

"""Small models that decode, and their texts by whole recomputation, without caches or layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core import decoding
from mesh_tf_core import layers as nn
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower.verify import verify

VOCAB = mtf.Dim("vocab", 8)
D = mtf.Dim("d_model", 8)
HEADS, KV = mtf.Dim("heads", 4), mtf.Dim("d_kv", 4)
BATCH = mtf.Dim("batch", 4)

KINDS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "multi-query": {"kv_heads": 1},
    "grouped-query": {"kv_heads": 2},
    "shared keys and values": {"shared_kv": True},
    "rotary": {"rotary": nn.Rotary()},
    "relative": {"bias": True},
    "sinusoids": {"sinusoids": True},
    "window": {"window": 3},
    "window, rotary, relative": {"window": 3, "rotary": nn.Rotary(), "bias": True},
    "wide window": {"window": 64},
    "local": {"window": 4, "kind": nn.LocalAttention},
    "local, relative": {"window": 2, "kind": nn.LocalAttention, "bias": True},
    "chunks, rotary": {"kind": nn.ChunkedAttention, "chunk": 4, "rotary": nn.Rotary()},
    "latent": {
        "kind": nn.LatentAttention,
        "kv_rank": mtf.Dim("kv_rank", 4),
        "d_rotary": 2,
        "d_v": mtf.Dim("d_v", 4),
        "q_rank": mtf.Dim("q_rank", 4),
    },
    "encoder": {"encoder": True},
    "branched": {"kind": nn.BranchedAttention, "d_ff": mtf.Dim("branch_ff", 8)},
    "bilinear": {"kind": nn.BilinearAttention, "d_kv": mtf.Dim("d_kv", 8)},
}
"""Fields of the attention, and what else the model has."""


@dataclass
class Net:
    """A decoder-only model of two layers, or with `encoder` one that also reads a source.

    Attributes:
      prompts: int32 [batch, length].
      dtype: of activations; float64 makes layouts comparable token by token.
    """

    graph: mtf.Graph
    length: int = 8
    dtype: str = "float64"
    batch: mtf.Dim = BATCH
    vocab: mtf.Dim = VOCAB
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = self.graph
        options = dict(self.fields)
        bias, encoder, self.sinusoids = (options.pop(n, False) for n in ("bias", "encoder", "sinusoids"))
        kind = options.pop("kind", nn.Attention)
        self.attention = kind(HEADS, options.pop("d_kv", KV), causal=True, **options)
        self.across = nn.Attention(HEADS, KV, name="cross_attention")
        self.embedding = nn.Embedding(self.vocab, D, self.dtype, stddev=1.0)
        self.table = self.embedding.table(g)
        self.bias = nn.RelativeBias(8, 8, bidirectional=False) if bias else None
        self.memory = self.seen = None
        if encoder:
            source = g.input("source", [self.batch, mtf.Dim("source_length", 4)])
            self.seen = mtf.rename(source > 0, source_length="memory_length")
            self.memory = self.embedding(self.table, mtf.rename(source, source_length="memory_length"))

    def __call__(self, tokens: mtf.Tensor, cache: decoding.Cache | None = None) -> mtf.Tensor:
        x = self.embedding(self.table, tokens)
        if self.sinusoids:
            x = nn.Sinusoids()(x, cache)
        else:
            x = nn.LearnedPositions(self.length, stddev=1.0)(x, cache=cache)
        bias = None
        if self.bias is not None:
            bias = self.bias(self.attention.relative_at(x, cache), self.attention.head_dims, self.dtype)

        def layer(x: mtf.Tensor) -> mtf.Tensor:
            x = x + self.attention(nn.LayerNorm(name="norm")(x), bias=bias, cache=cache)
            if self.memory is not None:
                y = nn.LayerNorm(name="cross_norm")(x)
                x = x + self.across(y, self.memory, mask=self.seen, cache=cache)
            return x + nn.FeedForward(mtf.Dim("d_ff", 8))(x)

        x = decoding.scan_layers(layer, x, mtf.Dim("layers", 2), cache)
        return self.embedding.logits(x) * 2.0


Decode = Callable[..., decoding.Decoded]


@dataclass
class Run:
    """Texts and scores of one program, and the bytes that were sent."""

    tokens: Any
    scores: Any
    program: Program
    sent: Mapping[str, float]


def feeds(length: int = 8, batch: int = BATCH.size, vocab: int = VOCAB.size) -> dict[str, Any]:
    """Random prompts of lengths 1, 2, 3, ... and sources."""
    rng = np.random.default_rng(0)
    return {
        "prompts": rng.integers(1, vocab, (batch, length)).astype(np.int32),
        "lengths": (np.arange(batch) % 3 + 1).astype(np.int32),
        "source": rng.integers(0, vocab, (batch, 4)).astype(np.int32),
        "seed": np.int32(7),
    }


def decoded(
    decode: Decode,
    fields: Mapping[str, Any],
    mesh: str = "one:1",
    layout: str = "",
    length: int = 8,
    engine: Callable[[Program], Any] = LockstepEngine,
    **net: Any,
) -> Run:
    """The texts that `decode(logits, prompts, lengths=..)` gives for `feeds`."""
    g = mtf.Graph()
    model = Net(g, length, fields=fields, **net)
    positions = mtf.Dim("length", length)
    prompts, lengths = g.input("prompts", [model.batch, positions]), g.input("lengths", [model.batch])
    found = decode(model, prompts, lengths=lengths)
    results = {"tokens": found.tokens, "scores": found.scores}
    program = verify(mtf.lower(g, mtf.Mesh(mesh), mtf.Layout(layout), results))
    running = engine(program)
    out = running.step(feeds(length, model.batch.size, model.vocab.size))
    # The program says what all positions would send; a loop that ends early sends less.
    most = program.communication_bytes()
    assert all(sent <= most[axes] for axes, sent in running.communication_bytes.items())
    return Run(out["tokens"], out["scores"], program, running.communication_bytes)


def whole_logits(fields: Mapping[str, Any], tokens: Any, length: int = 8, **net: Any) -> Any:
    """The model's logits of whole texts: no cache, one device."""
    g = mtf.Graph()
    model = Net(g, length, fields=fields, **net)
    y = model(g.input("tokens", [model.batch, mtf.Dim("length", length)]))
    program = mtf.lower(g, mtf.Mesh("one:1"), mtf.Layout(), {"y": y})
    given = feeds(length, model.batch.size, model.vocab.size)
    return LockstepEngine(program).step({**given, "tokens": tokens})["y"]


def log_probabilities(fields: Mapping[str, Any], tokens: Any, length: int = 8, **net: Any) -> Any:
    """Of every token after each position of whole texts."""
    y = whole_logits(fields, tokens, length, **net)
    return y - np.log(np.exp(y - y.max(-1, keepdims=True)).sum(-1, keepdims=True)) - y.max(-1, keepdims=True)

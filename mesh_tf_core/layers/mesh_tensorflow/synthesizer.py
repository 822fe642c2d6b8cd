"""Attention with logits that are not products of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Attention, Given
from mesh_tf_core.layers.base import project
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.math import relu, sigmoid
from mesh_tf_core.ops.random import dropout

KINDS = ("random", "factorized", "dense")


@dataclass(frozen=True)
class Synthesizer(Attention):
    """Logits that are learned, or made from the query's token alone (Tay et al. 2021, "Synthesizer",
    section 3).

    Attributes:
      kind: `random`, a learned matrix [length, memory_length] per head; `factorized`, one of rank `rank`;
        `dense`, relu(q) times a learned matrix [d_kv, memory_length] per head.
      rank: of the factorized kind.
      mixed: the logits are a learned mean of these and of products of queries and keys (section 3.3).
    """

    kind: str = "random"
    rank: int = 8
    mixed: bool = False
    cached: ClassVar[bool] = False
    lacks: ClassVar[tuple[str, ...]] = ("kv_heads", "shared_kv", "rotary")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise UserError(f"Synthesizer: kind={self.kind!r} is unknown; {known_names(self.kind, KINDS)}")
        if self.rank < 1:
            raise UserError(f"Synthesizer: rank must be positive, found {self.rank}")

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        """Attends by weights that no keys decide."""
        memory, bias = self.memory_of(x, given.memory), given.bias
        d = x.dim(self.d_model)
        with x.graph.scope(self.name):
            logits = self._logits(x, memory)
            logits = logits if bias is None else logits + bias.cast(logits.dtype)
            weights = self.weights(logits, self.seen(x, given.mask, given.segments), self.memory_length)
            v = project(memory, "v", [d], [self.heads, self.d_kv])
            mixed = [*x.shape.without(d.name), self.heads, self.d_kv]
            share = self.visible(x, x.dim(self.length), v.dim(self.memory_length).size)
            return self.joined(einsum([dropout(weights, self.dropout), v], mixed, needed=share), x)

    def _logits(self, x: Tensor, memory: Tensor) -> Tensor:
        """[others (not random), heads, length, memory_length]."""
        g, d, h = x.graph, x.dim(self.d_model), self.heads
        length, keys = x.dim(self.length), memory.dim(self.memory_length)
        share = self.visible(x, length, keys.size)
        dims = [*x.shape.without(self.length, d.name), h, length, keys]
        q = project(x, "q", [d], [h, self.d_kv]) if self.mixed or self.kind == "dense" else None

        def weight(name: str, own: list[Dim], stddev: float) -> Tensor:
            return g.variable(name, [h, *own], Normal(stddev), activation_dtype=x.dtype)

        if self.kind == "dense":
            assert q is not None
            made = weight("made", [self.d_kv, keys], 1 / math.sqrt(self.d_kv.size))
            synthetic = einsum([relu(q), made], dims, needed=share)
        elif self.kind == "random":
            synthetic = weight("made", [length, keys], 1.0)
        else:
            rank = Dim("rank", self.rank)
            left = weight("left", [length, rank], self.rank**-0.25)
            synthetic = einsum([left, weight("right", [keys, rank], self.rank**-0.25)], [h, length, keys])
        if not self.mixed:
            return synthetic
        assert q is not None
        products = einsum([q, project(memory, "k", [d], [h, self.d_kv])], dims, needed=share)
        products = products * self.d_kv.size**-0.5
        part = sigmoid(g.variable("alpha", [], ZEROS, activation_dtype=x.dtype))
        return products * (1.0 - part) + synthetic * part

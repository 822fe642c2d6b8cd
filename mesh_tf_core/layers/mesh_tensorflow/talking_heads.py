"""Attention that mixes heads before and after the softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Attention, Given
from mesh_tf_core.layers.base import project
from mesh_tf_core.ops.basic import add_n
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.random import dropout

DYNAMIC = ("x2l", "m2l", "x2w", "m2w")


@dataclass(frozen=True)
class TalkingHeadsAttention(Attention):
    """Products of queries and keys for `key_heads` are mixed linearly into logits for `softmax_heads`, and
    the weights into those of `value_heads` (Shazeer et al. 2020, "Talking-heads attention", section 5).

    Attributes:
      heads: further heads, which all have and which are not mixed, so that they can be split over the mesh;
        of size 1 if all heads are mixed.
      dynamic: mixing matrices that also depend on the input (section 7): on the queries' (`x2l`, `x2w`) or
        the memory's (`m2l`, `m2w`), of the logits or of the weights.
    """

    key_heads: Dim = field(kw_only=True)
    softmax_heads: Dim = field(kw_only=True)
    value_heads: Dim = field(kw_only=True)
    dynamic: tuple[str, ...] = ()
    cached: ClassVar[bool] = False
    lacks: ClassVar[tuple[str, ...]] = ("kv_heads", "shared_kv")
    instead: ClassVar[str] = "set key_heads instead"

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [self.heads.name, self.key_heads.name, self.softmax_heads.name, self.value_heads.name]
        if len(set(names)) < 4:
            raise UserError(
                "TalkingHeadsAttention: heads, key_heads, softmax_heads and value_heads must have four "
                f"different names, found {', '.join(names)}"
            )
        for name in self.dynamic:
            if name not in DYNAMIC:
                raise UserError(
                    f"TalkingHeadsAttention: {name!r} in `dynamic` is unknown; {known_names(name, DYNAMIC)}"
                )

    @property
    def head_dims(self) -> tuple[Dim, ...]:
        """The dimensions of the logits, which a bias may have."""
        return (self.heads, self.softmax_heads)

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        """Attends with logits [others, heads, softmax_heads, length, memory_length]."""
        memory, bias = self.memory_of(x, given.memory), given.bias
        others = x.shape.without(self.length, self.d_model)
        with x.graph.scope(self.name):
            q, k, v = self.projections(x, memory)
            if self.rotary is not None:
                q = self.rotary(q, self.length, self.d_kv.name)
                k = self.rotary(k, self.memory_length, self.d_kv.name)
            pairs = [x.dim(self.length), memory.dim(self.memory_length)]
            share = self.visible(q, pairs[0], pairs[1].size)
            products = einsum([q, k], [*others, self.heads, self.key_heads, *pairs], needed=share)
            products = products * self.d_kv.size**-0.5
            logits = self._talk("logits", products, self.key_heads, self.softmax_heads, x, memory)
            logits = logits if bias is None else logits + bias.cast(logits.dtype)
            weights = self.weights(logits, self.seen(x, given.mask, given.segments), self.memory_length)
            weights = self._talk("weights", weights, self.softmax_heads, self.value_heads, x, memory)
            inner = [self.heads, self.value_heads, self.d_kv]
            made = [*x.shape.without(self.d_model), *inner]
            mixed = einsum([dropout(weights, self.dropout), v], made, needed=share)
            return project(mixed, "o", inner, [x.dim(self.d_model)])

    def projections(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of the memory."""
        d = [x.dim(self.d_model)]
        q = project(x, "q", d, [self.heads, self.key_heads, self.d_kv])
        k = project(memory, "k", d, [self.heads, self.key_heads, self.d_kv])
        return q, k, project(memory, "v", d, [self.heads, self.value_heads, self.d_kv])

    def _talk(self, name: str, p: Tensor, before: Dim, after: Dim, x: Tensor, memory: Tensor) -> Tensor:
        """p with its heads `before` mixed into `after`, by one matrix per unmixed head."""
        d, dims = x.dim(self.d_model), [self.heads, before, after]
        fixed = self._matrix(x, name, dims, 1 / math.sqrt(before.size))
        out = Shape(after if dim == before else dim for dim in p.shape)
        mixers = [fixed]
        for source, kind in ((x, f"x2{name[0]}"), (memory, f"m2{name[0]}")):
            if kind in self.dynamic:
                # A tenth of the fixed matrix' size at first: larger ones made learning hard (section 7).
                w = self._matrix(x, kind, [d, *dims], 0.1 / math.sqrt(d.size * before.size))
                mixers.append(einsum([source, w], [*source.shape.without(d.name), *dims]))
        return add_n([einsum([p, m], out) for m in mixers])

    def _matrix(self, x: Tensor, name: str, dims: Sequence[Dim], stddev: float) -> Tensor:
        return x.graph.variable(name, dims, Normal(stddev), activation_dtype=x.dtype)

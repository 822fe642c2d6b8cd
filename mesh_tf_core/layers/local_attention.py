"""Attention over blocks of positions: a window computed block by block, and chunks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from mesh_tf_core.decoding.cache import Cache
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Attention, Given, both
from mesh_tf_core.layers.caching import AtPosition
from mesh_tf_core.ops.index import mtf_range
from mesh_tf_core.ops.math import logical_and, mod
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.shape import concat, rename, reshape


@dataclass(frozen=True)
class _InBlocks(Attention):
    """What both have in common: `blocks` blocks of some positions in place of the length."""

    blocks: str = "blocks"

    @property
    def _names(self) -> tuple[str, str]:
        return f"block_{self.length}", f"block_{self.memory_length}"

    def _cut(self, x: Tensor, size: int, what: str) -> Tensor:
        """[others, length, d_model] -> [others, blocks, block_length, d_model]."""
        length = x.dim(self.length)
        if length.size % size:
            raise UserError(
                f"{type(self).__name__}: {length.name}={length.size} must be a multiple of {what}={size}"
            )
        return self._apart(x, self.length, size, self._names[0])

    def _apart(self, x: Tensor, dim: str, size: int, inside: str) -> Tensor:
        """A dimension as blocks and places in them."""
        at = x.shape.index(dim)
        two = Dim(self.blocks, x.dim(dim).size // size), Dim(inside, size)
        return reshape(x, Shape([*x.shape.dims[:at], *two, *x.shape.dims[at + 1 :]]))

    def _in_line(self, t: Tensor, around: str) -> Tensor:
        """Keys or values by position instead of by block."""
        positions = Dim(self.memory_length, t.dim(self.blocks).size * t.dim(around).size)
        at = t.shape.index(self.blocks)
        assert t.shape.index(around) == at + 1
        return reshape(t, Shape([*t.shape.dims[:at], positions, *t.shape.dims[at + 2 :]]))


@dataclass(frozen=True)
class LocalAttention(_InBlocks):
    """Attention within `window`, computed block by block: work in proportion to length x window.

    Positions are cut into blocks of `window`; a block sees itself and the one before (not causal: and the one
    after), which is every key that `Attention` with the same window sees, and the same variables. The
    dimension `blocks` takes the place of the length: split it as the length, and devices exchange one block
    with their neighbours (Parmar et al. 2018, "Image Transformer", section 3; Mesh-TensorFlow's
    local_attention_1d).

    Called as `Attention`, with a bias [block_length, block_memory_length, heads] from `RelativeBias` of
    `relative(x)`; a cache holds as many positions as the window sees.
    """

    lacks: ClassVar[tuple[str, ...]] = ("rotary", "memory", "mask", "segments")
    instead: ClassVar[str] = "use RelativeBias for positions, or Attention(window=..., attention='fused')"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.window:
            raise UserError(f"LocalAttention: window must be at least 1 position, found {self.window}")

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        """Attends block by block."""
        cache = given.cache
        size, g = x.dim(self.length).size, x.graph
        block, around = self._names
        with g.scope(self.name):
            parts = self._cut(x, self.window, "window")
            q, k, v = self.projections(parts, rename(parts, **{block: around}))
            if cache is not None:
                self.remember(cache, self._in_line(k, around), self._in_line(v, around), False)
            k, v = (self._with_neighbours(t, around) for t in (k, v))
            relative = self.relative(x)
            keys = mtf_range(g, k.dim(around)) + mtf_range(g, parts.dim(self.blocks)) * self.window
            exists = logical_and(keys >= self.window, keys < self.window + size)
            seen = both(self.allowed(relative), exists)
            mixed = self.mix(q, k, v, block, around, seen, given.bias)
            return reshape(self.joined(mixed, parts), x.shape)

    def visible(self, q: Tensor, rows: Dim, keys: int) -> float:
        return self.seen_of(rows.size * q.dim(self.blocks).size, keys)

    def _with_neighbours(self, t: Tensor, around: str) -> Tensor:
        """Keys or values of a block between those of the block before and, if not causal, after."""
        pieces = [shift(t, 1, self.blocks), t]
        return concat(pieces if self.causal else [*pieces, shift(t, -1, self.blocks)], around)

    def relative(self, x: Tensor) -> Tensor:
        """int32 [block_length, block_memory_length]: the key's position minus the query's, the same in every
        block."""
        block, around = self._names
        count = self.window * (2 if self.causal else 3)
        keys = mtf_range(x.graph, Dim(around, count)) - self.window
        return -(mtf_range(x.graph, Dim(block, self.window)) - keys)


@dataclass(frozen=True)
class ChunkedAttention(_InBlocks):
    """Attention within chunks: a query sees only keys of its own chunk of `chunk` positions. Work is
    proportional to length x chunk, and no masked logits are computed (Llama 4's layers with rotary positions,
    chunks of 8192).

    The dimension `blocks` takes the place of the length: split it as the length. Rotations count from the
    chunk's first position; products of queries and keys depend on their distance alone.

    Called as `Attention`, with a mask of any of [others, heads, memory_length], as `padding_mask` gives it,
    and a bias [block_length, block_memory_length, heads] from `RelativeBias` of `relative(x)`; a cache holds
    as many positions as a chunk has.
    """

    chunk: int = field(default=0, kw_only=True)
    lacks: ClassVar[tuple[str, ...]] = ("memory",)
    instead: ClassVar[str] = "use Attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise UserError(f"ChunkedAttention: chunk must be at least 1 position, found {self.chunk}")

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        """Attends chunk by chunk."""
        cache, mask, segments = given.cache, given.mask, given.segments
        inside, around = self._names
        inner = self._of_blocks()
        with x.graph.scope(self.name):
            parts = self._cut(x, min(self.chunk, x.dim(self.length).size), "chunk")
            size = parts.dim(inside).size
            q, k, v = self.projections(parts, rename(parts, **{inside: around}))
            if self.rotary is not None:
                q = self.rotary(q, inside, self.d_kv.name)
                k = self.rotary(k, around, self.d_kv.name)
            if cache is not None:
                self.remember(cache, self._in_line(k, around), self._in_line(v, around), False)
            if mask is not None:
                mask = self._apart(mask, self.memory_length, size, around)
            if segments is not None:
                own, others = segments
                own = self._apart(own, self.length, size, inside)
                segments = own, self._apart(others, self.memory_length, size, around)
            mixed = inner.attended(q, k, v, parts, mask, given.bias, segments)
            return reshape(self.joined(mixed, parts), x.shape)

    def _of_blocks(self) -> Attention:
        """Attention over the positions of a block."""
        same = {f.name: getattr(self, f.name) for f in fields(Attention)}
        inside, around = self._names
        return replace(Attention(**same), length=inside, memory_length=around, rotary=None)

    def relative(self, x: Tensor) -> Tensor:
        """int32 [block_length, block_memory_length]: the key's position minus the query's, the same in every
        chunk."""
        size = min(self.chunk, x.dim(self.length).size)
        query, key = (mtf_range(x.graph, Dim(n, size)) for n in self._names)
        return -(query - key)

    def place(self, cache: AtPosition) -> Tensor:
        """The position within its chunk."""
        return mod(cache.position, self.chunk)

    def kept(self, cache: Cache) -> int:
        """Positions whose keys and values a cache stores."""
        return min(self.chunk, super().kept(cache))

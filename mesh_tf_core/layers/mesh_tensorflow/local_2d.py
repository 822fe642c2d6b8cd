"""Attention between neighbouring blocks of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.tensor import Builder, Tensor
from mesh_tf_core.layers.attention import Attention, Given
from mesh_tf_core.ops.index import mtf_range
from mesh_tf_core.ops.math import floordiv, mod
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.shape import concat, rename, reshape

_MEMORY = "block_memory"


@dataclass(frozen=True)
class LocalAttention2D(Attention):
    """A pixel sees those that are fewer than `window` rows and columns away; if causal, only itself and
    pixels before it in reading order.

    Images are cut into blocks of window x window pixels, and a block gets the pixels of its eight neighbours
    (causal: of those above and on the left). The dimensions `height_blocks` and `width_blocks` take the
    places of height and width: split them as these, and devices exchange one row or column of blocks (Parmar
    et al. 2018, "Image Transformer", section 3; Mesh-TensorFlow's local_2d_self_attention_spatial_blocks).

    Attributes:
      height, width: names of the dimensions of the image, multiples of the window.
      length: name for the pixels of a block.
    """

    length: str = "pixel"
    height: str = "height"
    width: str = "width"
    cached: ClassVar[bool] = False
    lacks: ClassVar[tuple[str, ...]] = ("rotary", "memory", "mask", "bias", "segments")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.window:
            raise UserError(f"LocalAttention2D: window must be at least 1 pixel, found {self.window}")

    def over_text(self, x: Tensor, given: Given) -> Tensor:
        """[others, height, width, d_model] -> the same."""
        sides = [x.dim(self.height), x.dim(self.width)]
        for side in sides:
            if side.size % self.window:
                raise UserError(
                    f"LocalAttention2D: the size of {side.name!r}, {side.size}, must be a multiple of "
                    f"window={self.window}"
                )
        blocks = [Dim(f"{side.name}_blocks", side.size // self.window) for side in sides]
        others = x.shape.without(self.height, self.width, self.d_model)
        d, pixels = x.dim(self.d_model), Dim(self.length, self.window**2)
        inside = [Dim(f"block_{side.name}", self.window) for side in sides]
        apart = [dim for pair in zip(blocks, inside, strict=True) for dim in pair]
        with x.graph.scope(self.name):
            parts = reshape(reshape(x, [*others, *sides, d]), [*others, *apart, d])
            parts = reshape(parts, [*others, *blocks, *inside, d])
            flat = reshape(parts, [*others, *blocks, pixels, d])
            q, k, v = self.projections(flat, rename(flat, **{self.length: _MEMORY}))
            k, v = (self._with_neighbours(t, blocks, inside) for t in (k, v))
            mixed = self.mix(q, k, v, self.length, _MEMORY, self._allowed(x.graph, sides, blocks), None)
            y = reshape(self.joined(mixed, flat), [*others, *blocks, *inside, d])
            y = reshape(y, [*others, *apart, d])
            return reshape(reshape(y, [*others, *sides, d]), x.shape)

    def _with_neighbours(self, t: Tensor, blocks: list[Dim], inside: list[Dim]) -> Tensor:
        """Keys or values [others, blocks, block_memory, rest] with those of the neighbours around them."""
        at = t.shape.index(_MEMORY)
        before, rest = t.shape.dims[:at], t.shape.dims[at + 1 :]
        t = reshape(t, Shape([*before, *inside, *rest]))
        for along, own, later in zip(blocks, inside, (not self.causal, True), strict=True):
            pieces = [shift(t, 1, along), t, *([shift(t, -1, along)] if later else [])]
            t = concat(pieces, own)
        area = t.dim(inside[0].name).size * t.dim(inside[1].name).size
        return reshape(t, Shape([*before, Dim(_MEMORY, area), *rest]))

    def _allowed(self, g: Builder, sides: list[Dim], blocks: list[Dim]) -> Tensor:
        """Bool [height_blocks, width_blocks, pixel, block_memory]: keys that are in the image, near, and if
        causal not later."""
        w = self.window
        queries = mtf_range(g, Dim(self.length, w * w))
        rows = 2 if self.causal else 3
        keys = mtf_range(g, Dim(_MEMORY, rows * 3 * w * w))
        down = floordiv(keys, 3 * w) - w
        across = mod(keys, 3 * w) - w
        dy = -(floordiv(queries, w) - down)
        dx = -(mod(queries, w) - across)
        seen = (dy > -w) & (dy < w) & (dx > -w) & (dx < w)
        if self.causal:
            seen = seen & ((dy < 0) | (dy.equal(0) & (dx <= 0)))
        for side, block, place in zip(sides, blocks, (down, across), strict=True):
            where = mtf_range(g, block) * w + place
            seen = seen & (where >= 0) & (where < side.size)
        return seen

"""The recipes of `mtf.float8_einsum`: formats of eight bits, and which elements have a scale together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Shape, SparseDim

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""Format -> its largest number (Micikevicius et al. 2022, table 1)."""


@dataclass(frozen=True)
class Float8Recipe:
    """The formats and scales of float8 products.

    Attributes:
      text: what it is, with its source.
      backward: the format of gradients of results; factors of forward are e4m3.
      scaled: elements with one scale: "tensor" all, "row" those that a product sums, or a number of
        consecutive ones among these.
      limit: factors of forward are cut to between -limit and limit, which their one scale is for: none is
        found in the step; 0: scales are those of the elements.
      gates: backward of gated units has their inputs in eight bits (`layers.base.gated`).
    """

    text: str
    backward: str
    scaled: str | int
    gates: bool = False
    limit: float = 0.0

    def parts(self, x: Shape, summed: Sequence[str], weight: bool = False) -> tuple[tuple[str, ...], str]:
        """The dimensions over which a scale is one, and that along which it changes from block to block."""
        if self.scaled == "tensor":
            return x.names, ""
        if isinstance(self.scaled, int):
            # The first dimension of others than weights is the batch's: its rows are of any number.
            places = [x.dim(n) for n in summed if weight or n != x.names[0]]
            fits = [d.name for d in places if not (isinstance(d, SparseDim) or d.size % self.scaled)]
            if fits:
                return tuple(n for n in summed if n != fits[-1]), fits[-1]
        return tuple(summed), ""


RECIPES = {
    "tensor": Float8Recipe(
        "one scale for a tensor, e5m2 for gradients (Micikevicius et al. 2022, as Transformer Engine does)",
        E5M2,
        "tensor",
    ),
    "fixed": Float8Recipe(
        "as tensor, with a fixed scale for factors of forward, which are cut at 224 (MaxText's fp8_full); "
        "experts' weights are gathered in eight bits (_fwd_gather_weight of its megablox/ops.py @e591f30)",
        E5M2,
        "tensor",
        limit=224.0,
    ),
    "rowwise": Float8Recipe("one scale for a row or column of a product (torchao's rowwise)", E4M3, "row"),
    "blocks": Float8Recipe(
        "one scale for 128 elements (DeepSeek-V3, section 3.3; its weights: 128 x 128)", E4M3, 128, True
    ),
    "mxfp8": Float8Recipe("one scale for 32 elements (OCP Microscaling Formats 1.0, MXFP8)", E4M3, 32),
}
"""Name -> recipe. Everything but the products of layers with their weights keeps its dtype in all of them."""


def recipe_named(name: str) -> Float8Recipe:
    """The recipe of this name; UserError if there is none."""
    if name not in RECIPES:
        raise UserError(f"float8 recipe {name!r} is unknown; {known_names(name, RECIPES)}")
    return RECIPES[name]

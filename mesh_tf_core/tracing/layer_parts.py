"""Layers of a virtual stage, in parts of which backward reads the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.microbatch_order import HalfBackward

OfParts = Sequence[Mapping[int, Tensor]]
"""For each part of a virtual stage's layers: tensors of a layer's body -> their stacks."""


class CopiedLayers(NamedTuple):
    """The layers that are copied: the number of the first of all, and of the stage's if it has several
    chunks; the model's numbers of the stage's layers, if some stage lacks one."""

    begins: Tensor
    first: Tensor | None
    numbers: Tensor | None


Again = Sequence[tuple[Block, Block]] | None
"""The bodies of layers of which some are recomputed, forward and backward, by parts (`lower.recomputed`);
None: stages keep all values that backward reads."""
WHOLE_STAGE: Again = ()
"""All layers of a virtual stage are recomputed, one after the other, from the input state."""


class LayerPart(NamedTuple):
    """Layers of a virtual stage, one after the other, whose backward reads the same of each.

    Attributes:
      dim: of their loop; `begin`: their first layer, of those of the virtual stage.
      forward, backward: their bodies.
      keeps: tensors of their body that are stacked in the forward run.
      halves: of their backward, if gradients of weights have slots of their own.
    """

    dim: Dim
    begin: int
    forward: Block
    backward: Block
    keeps: Sequence[int] = ()
    halves: Sequence[HalfBackward] = ()

    @property
    def between(self) -> Sequence[int]:
        """The tensors that one half of their backward makes for the other."""
        return self.halves[0].between if self.halves else ()

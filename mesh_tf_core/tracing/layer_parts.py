"""Layers of a virtual stage, in parts of which backward reads the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mesh_tf_core.ir.blocks import Node
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


class LayerAgain(NamedTuple):
    """The part of a layer that is recomputed for its backward.

    Attributes:
      kept: tensors of its body that stay: states as it begins, and others.
      nodes: nodes of its body between these and the values that backward reads.
      only: number of a virtual stage's layers, the first ones, that are recomputed: 0 for all.
    """

    kept: Sequence[int] = ()
    nodes: Sequence[Node] = ()
    only: int = 0


Again = LayerAgain | None
"""None: nothing is recomputed, stages keep all values that backward reads."""
WHOLE_STAGE = LayerAgain()
"""All layers of a virtual stage are recomputed, one after the other, from the input state."""


class LayerPart(NamedTuple):
    """Layers of a virtual stage, one after the other, whose backward reads the same of each.

    Attributes:
      dim: of their loop; `begin`: their first layer, of those of the virtual stage.
      second: the part of each that is recomputed; None: none.
      keeps: tensors of their body that are stacked in the forward run.
      halves: of their backward, if gradients of weights have slots of their own.
    """

    dim: Dim
    begin: int = 0
    second: LayerAgain | None = None
    keeps: Sequence[int] = ()
    halves: Sequence[HalfBackward] = ()

    @property
    def between(self) -> Sequence[int]:
        """The tensors that one half of their backward makes for the other."""
        return self.halves[0].between if self.halves else ()

"""The work of PyTorch over each axis of a plan's mesh, and the split of every parameter that follows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layoutopt.importers.arrays.placing import ArrayAxes
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT, SPLIT, STAGES, read_stage

PIPE, REPLICATE, SHARD, EXPERTS, TENSOR = "pipe", "replicate", "shard", "experts", "tensor"
"""The axes of the mesh by use."""
DATA = (REPLICATE, SHARD)


@dataclass(frozen=True)
class PlanRanks:
    """The axes of a mesh by use, and the splits of a module's parameters.

    Attributes:
      parameters: path -> the axes of the parameter as dimensions.
      layers: the dimensions of layers; `choices`: of experts.
      types: in which parameters are gathered ("": their own), and gradients added up over microbatches.
    """

    mesh: Mesh
    layout: Layout
    options: Options
    parameters: Mapping[str, ArrayAxes]
    layers: Collection[str] = ()
    choices: Collection[str] = ()
    types: tuple[str, str] = ("", "")

    @cached_property
    def pipe(self) -> Axes:
        """The axes of the stages of a pipeline."""
        return tuple(a for name in self.layers for a in self.layout.axes(name))

    @cached_property
    def tensor(self) -> Axes:
        """The axes that split weights, in the order in which they split the first one."""
        found = (a for p in self.parameters.values() for axes in self.read(p) for a in axes)
        return tuple(a for a in dict.fromkeys(found) if a not in self.experts)

    @cached_property
    def experts(self) -> Axes:
        """The data axes that experts lie over."""
        return tuple(dict.fromkeys(a for name in self.choices for a in self.layout.axes(name)))

    @cached_property
    def stage(self) -> str:
        """The stage of storage of all parameters."""
        numbers = (read_stage(s).number for s in self.options.storage.values())
        return STAGES[max(numbers, default=0)]

    @cached_property
    def reduced(self) -> str:
        """The element type in which gradients are summed over ranks: that in which they are made, or added up
        before."""
        alone = self.options.microbatches == 1 or (GRADIENT, BACKWARD) in SPLIT[self.stage]
        return self.types[0] if alone else self.types[1]

    @cached_property
    def data(self) -> Axes:
        """The axes of ranks with the same part of the weights."""
        return tuple(a for a, size in self.mesh.axes if size > 1 and a not in (*self.tensor, *self.pipe))

    @cached_property
    def shard(self) -> Axes:
        """The data axes over which `fully_shard` splits."""
        if self.stage == STAGES[0]:
            return ()
        over = {a for s in self.options.storage.values() for a in read_stage(s).over or self.data}
        found = tuple(a for a in self.data if a in over)
        return (*(a for a in found if a not in self.experts), *self.experts)

    @cached_property
    def replicate(self) -> Axes:
        """The other data axes."""
        return tuple(a for a in self.data if a not in self.shard)

    def size(self, axes: Axes) -> int:
        """The number of ranks along axes."""
        return self.mesh.group_size(axes)

    def read(self, array: ArrayAxes) -> tuple[Axes, ...]:
        """Per axis of a parameter the mesh axes over which operations read it, from the outermost."""
        return tuple(tuple(a for n in names for a in self.layout.axes(n)) for names in array.axes)

    def stored(self, array: ArrayAxes) -> tuple[Axes, ...]:
        """The same between steps: `fully_shard` splits the first axis further."""
        if not array.shape:
            return ()
        first, *rest = self.read(array)
        return ((*first, *(a for a in self.shard if a not in first)), *rest)

    def elements(self, array: ArrayAxes) -> int:
        """The most elements that a rank holds."""
        found = zip(array.shape, self.stored(array), strict=True)
        return math.prod(-(-size // self.size(axes)) for size, axes in found)

    def splits(self, axes: Sequence[Axes]) -> list[tuple[int, int] | None]:
        """Per axis of the mesh the axis of an array that it splits, and the ways in which later axes of the
        mesh split that one first; None if it splits nothing."""
        found: list[tuple[int, int] | None] = []
        for i, own in enumerate(self.mesh.names):
            at = next((d for d, several in enumerate(axes) if own in several), None)
            if at is None or self.mesh.size(own) == 1:
                found.append(None)
                continue
            outer = axes[at][: axes[at].index(own)]
            later = tuple(a for a in outer if self.mesh.names.index(a) > i)
            found.append((at, self.size(later)))
        return found

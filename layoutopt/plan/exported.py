"""An export: a layout, the tensors that lie between steps, and the other decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layoutopt.plan.decided import Decided
from layoutopt.plan.units import clean
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh

if TYPE_CHECKING:
    from mesh_tf_core.ir.program import Program


NAMED = 3
"""Names that a refusal has."""
MODULES = "MODULES"
"""The section of `Exported.arrays` with the parameters of PyTorch modules; `*` is the number of a layer."""


@dataclass(frozen=True)
class ExportedTensor:
    """A variable or an input: its dimensions, the axes that each is split over, and its size.

    Attributes:
      table: its rows are looked up.
    """

    name: str
    dims: tuple[str, ...]
    splits: tuple[Axes, ...]
    sizes: tuple[int, ...]
    trained: bool = False
    table: bool = False


@dataclass(frozen=True)
class Exported:
    """The written export: a layout, every tensor that is stored between steps, and the other decisions.

    Attributes:
      arrays: by the name of a section, the arrays of the user's own program, or of the classes of a library
        that the model stands for.
      slices: mesh axis -> number of slices that it spans, if more than one.
      framework: as the plan has it, with its version.
    """

    title: str
    mesh: Mesh
    layout: Layout
    variables: tuple[ExportedTensor, ...]
    inputs: tuple[ExportedTensor, ...]
    decided: Decided = field(default_factory=Decided)
    arrays: Mapping[str, tuple[ExportedTensor, ...]] = field(default_factory=dict)
    slices: Mapping[str, int] = field(default_factory=dict)
    framework: str = ""


def placed(program: Program) -> tuple[tuple[ExportedTensor, ...], tuple[ExportedTensor, ...]]:
    """The variables and the inputs of a program."""
    stored = (
        (name, s.variable.shape, s.splits, s.variable.trainable) for name, s in program.variables.items()
    )
    feeds = ((name, program.values[i]) for name, i in program.feeds.items())
    variables = tuple(
        ExportedTensor(name, shape.names, splits, shape.sizes, trained)
        for name, shape, splits, trained in stored
    )
    return variables, tuple(ExportedTensor(name, v.shape.names, v.splits, v.shape.sizes) for name, v in feeds)


def comment(text: str) -> str:
    """One line, whatever the names in it are."""
    return f"# {clean(' '.join(text.split()))}"

"""An export: a layout, the tensors that lie between steps, and the other decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from costmodels.frameworks import load_framework
from layoutopt.plan.decided import Decided
from layoutopt.plan.units import clean
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.remat_policy import Recomputed

if TYPE_CHECKING:
    from mesh_tf_core.ir.program import Program


HALVES = {"bfloat16": "bf16", "float16": "fp16"}
"""The word of settings for products in a dtype other than float32."""
NAMED = 3
"""Names that a refusal has."""
MODULES = "MODULES"
"""The section of `Exported.arrays` with the parameters of PyTorch modules; `*` is the number of a layer."""


@dataclass(frozen=True)
class ExportedTensor:
    """A variable or an input: its dimensions, the axes that each is split over, and its size.

    Attributes:
      table: its rows are looked up. stacked: its first dimension counts the layers of a loop.
    """

    name: str
    dims: tuple[str, ...]
    splits: tuple[Axes, ...]
    sizes: tuple[int, ...]
    trained: bool = False
    table: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Exported:
    """The written export: a layout, every tensor that is stored between steps, and the other decisions.

    Attributes:
      arrays: by the name of a section, the arrays of the user's own program, or of the classes of a library
        that the model stands for.
      slices: mesh axis -> number of slices that it spans, if more than one.
      framework: as the plan has it, with its version.
      dtype: of the products that most FLOPs are in; "": unknown.
      chips: their kind; family: `model_type` of the model's configuration; "": unknown, or none.
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
    dtype: str = ""
    chips: str = ""
    family: str = ""

    def heading(self, to: str) -> list[str]:
        """Comments before the settings of a framework: the title, and that it has no model of the family."""
        runs = load_framework(to).programs
        lacks = self.family and runs and runs.families is not None and self.family not in runs.families
        no = f"{to} has no model of the family {self.family}: these settings are for one that you write."
        return [comment(self.title), *([comment(no)] if lacks else [])]

    @property
    def stacks(self) -> list[str]:
        """The dimensions of layers of trained variables."""
        return [*dict.fromkeys(v.dims[0] for v in self.variables if v.trained and v.stacked)]

    @property
    def recomputed(self) -> tuple[str, int]:
        """`full`, or `selective` if the recomputed layers keep something, '' if nothing is recomputed; and
        how many layers are, 0 for all; UserError for what settings of no framework say."""
        said = [Recomputed.parse(text) for text in self.decided.recompute]
        if len({r.keep for r in said}) > 1 or any(r.only and (r.keep or said[1:]) for r in said):
            raise UserError(
                f"recompute {', '.join(self.decided.recompute)}: frameworks keep the same values in all "
                "layers, or recompute some layers of one loop; search with --recompute auto"
            )
        mode = "selective" if any(each.keep for each in said) else "full" if said else ""
        return mode, max((each.only for each in said), default=0)

    def every(self, count: int) -> int:
        """The k with which every k-th layer, of those of a stage, makes so many."""
        dim = Recomputed.parse(self.decided.recompute[0]).dim
        size = self.size(dim) // self.decided.pipeline.get(dim, 1)
        if found := [k for k in range(2, size + 1) if size // k == count]:
            return found[0]
        raise UserError(f"every k-th of {size} layers can be recomputed, which never makes {count}")

    def size(self, dim: str) -> int:
        """The size of a dimension of some variable."""
        return next(s for v in self.variables for d, s in zip(v.dims, v.sizes, strict=True) if d == dim)


def placed(program: Program) -> tuple[tuple[ExportedTensor, ...], tuple[ExportedTensor, ...]]:
    """The variables and the inputs of a program."""
    stored = ((n, s.variable, s.variable.shape, s.splits) for n, s in program.variables.items())
    feeds = ((name, program.values[i]) for name, i in program.feeds.items())
    variables = tuple(
        ExportedTensor(name, shape.names, splits, shape.sizes, v.trainable, stacked=v.stacked > 0)
        for name, v, shape, splits in stored
    )
    return variables, tuple(ExportedTensor(name, v.shape.names, v.splits, v.shape.sizes) for name, v in feeds)


def comment(text: str) -> str:
    """One line, whatever the names in it are."""
    return f"# {clean(' '.join(text.split()))}"


def cannot(to: str, why: str) -> UserError:
    """The error for a plan that a form cannot express, with a search whose plan it can."""
    return UserError(f"{to} {why}; search with --framework {software(to)}, or choose another format")


def software(to: str) -> str:
    """The framework whose searches find plans that a form can express."""
    return "transformers" if to == "accelerate" else to

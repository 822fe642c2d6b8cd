"""What a search goes through: mesh shapes, and numbers of microbatches on each, with what is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from layoutopt.space.decisions import Decisions, decisions
from layoutopt.space.kind import HYBRID, Allowed
from layoutopt.space.microbatches import numbers
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model


@dataclass(frozen=True)
class Subproblem:
    """One mesh shape with one number of microbatches: a problem of its own."""

    mesh: Mesh
    decided: Decisions

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.decided.microbatches


def subproblems(
    model: Model, shapes: Sequence[Mesh], allowed: Allowed, near: Callable[[Mesh], Axes] = lambda _: ()
) -> Iterator[Subproblem]:
    """Every problem of a search, the fewest microbatches of every mesh first.

    More microbatches are left out where what is pinned does not divide the smaller batch.

    Args:
      near: the axes of a mesh that lie inside nodes or slices, where others do not.

    Raises:
      UserError: the model cannot be split into any of these numbers, or what is pinned or forbidden does not
        suit even the fewest.
    """
    parts = numbers(model, allowed.microbatches)
    for number in parts:
        graph = model.training_step(number).graph
        for mesh in shapes:
            try:
                here = replace(
                    allowed, microbatches=(number,), near=near(mesh) if HYBRID in allowed.storage else ()
                )
                yield Subproblem(mesh, decisions(graph, mesh, here))
            except UserError:
                if number == parts[0]:
                    raise
